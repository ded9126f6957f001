"""`rope_and_attend` in the interpreter: `rope_and_cache` and `flash_decode` one after the other, in one kernel."""

import importlib

import pytest
import torch

from tests.attention_cases import DEVICE  # isort: skip

from kernels import flash_attention, reference
from kernels import flash_decode_plan as plans
from kernels.round import accept
from model import ModelConfig
from tests.test_flash_decode import exact, products_row_by_row  # noqa: F401
from tests.test_rope_cache import by_the_model, rope_inputs

decode = importlib.import_module("kernels.flash_decode")  # the module: the package's name is the function
rope_cache = importlib.import_module("kernels.rope_cache")

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, tests/gpu/test_flash_decode_gpu.py")
YARN = "yarn:4:64"  # its attention_factor is not 1


def case(heads, tokens, starts, slots, head_dim, *, dtype=torch.float32, int8=False, norm=False):
    """qkv, positions and caches that hold keys and values before each position and NaN behind them (int8: in their
    scales), `angles`, and the options that rope_and_cache and rope_and_attend share."""
    (n_head, n_kv_head), width = heads, heads[0] * head_dim
    config = ModelConfig(
        10, n_head=n_head, n_kv_head=n_kv_head, n_embd=width, head_dim=head_dim, qk_norm=norm, rope_scaling=YARN
    )
    (qkv, positions, inv_freq, k, v), options = rope_inputs(config, starts, tokens, slots, dtype, int8)
    generator = torch.Generator().manual_seed(7)
    for cache, scale in ((k, "k_scale"), (v, "v_scale")):
        old = torch.randn(cache.shape, generator=generator).to(dtype)
        if int8:
            old, options[scale] = reference.quantize_heads(old)
        cache.copy_(old)
        for b, start in enumerate(starts):
            (options[scale] if int8 else cache)[b, :, max(start, 0) :] = torch.nan
    factor = options.pop("attention_factor")
    angles = rope_cache.rope_angles(positions, tokens, inv_freq, factor)
    return config, qkv, positions, inv_freq, factor, angles, k, v, options


def copies(k, v, options):
    """Caches of one's own."""
    return k.clone(), v.clone(), {n: x.clone() if n.endswith("_scale") else x for n, x in options.items()}


def stored(cache, scale=None):
    """The bits of a cache and its scales, NaN included."""
    return [x.view(torch.uint8) for x in (cache, scale) if x is not None]


# heads, tokens, head_dim, window, int8, norm, lengths: around the interpreter's tiles (32) and chunks (32, then 64).
CASES = [
    ((4, 2), 1, 16, None, False, False, [31, 32, 33, 64, 65, 96, 97, 129, 192, 193]),
    ((6, 2), 2, 24, 40, True, False, [31, 33, 65, 129]),
    ((3, 3), 5, 18, None, False, True, [33, 66, 130]),
    ((6, 1), 9, 32, 1, False, False, [33, 69]),
    ((2, 1), 17, 80, None, True, False, [33, 65]),
    ((2, 1), 20, 16, 33, False, False, [70, 100, 129]),
    ((1, 1), 33, 16, None, False, False, [66]),
]


@pytest.mark.parametrize("heads,tokens,head_dim,window,int8,norm,lengths", CASES)
def test_the_cache_and_the_result_of_the_two_kernels(heads, tokens, head_dim, window, int8, norm, lengths):
    """At the start, around every edge, in the last slots, past them, and for a row that is padding."""
    slots = 200
    lengths = [tokens, *lengths, slots, slots + 1, slots + tokens, 0]
    starts = [length - tokens for length in lengths]
    *_, qkv, positions, inv_freq, factor, angles, k, v, options = case(
        heads, tokens, starts, slots, head_dim, int8=int8, norm=norm
    )
    other_k, other_v, other = copies(k, v, options)
    q = rope_cache.launch(qkv, positions, inv_freq, k, v, attention_factor=factor, **options)
    scales = {name: x for name, x in options.items() if name.endswith("_scale")}
    wanted = decode.launch(q, k, v, positions + tokens, window=window, **scales)
    got = decode.rope_and_attend(qkv, positions + tokens, angles, other_k, other_v, window=window, **other)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    live = torch.tensor([0 <= start for start in starts])  # the others see slots that hold NaN
    assert got[live & (positions + tokens <= slots)].isfinite().all()
    if norm:  # squares are added in another order
        torch.testing.assert_close(got[live], wanted[live], rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(other_k, k, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        torch.testing.assert_close(got[live], wanted[live], rtol=0, atol=0, equal_nan=True)
        for pair in zip(stored(k, options.get("k_scale")), stored(other_k, other.get("k_scale")), strict=True):
            assert torch.equal(*pair)
    for pair in zip(stored(v, options.get("v_scale")), stored(other_v, other.get("v_scale")), strict=True):
        assert torch.equal(*pair)


@pytest.mark.parametrize("int8", [False, True])
def test_bits_do_not_depend_on_company(int8, products_row_by_row):  # noqa: F811
    """A token alone, after those before it were taken alone too, as one of several, in a batch or not."""
    tokens, starts, slots = 3, [147, 66, 20], 150  # none of them across a turning point
    for heads, head_dim, norm in (((4, 2), 16, True), ((3, 1), 80, False)):
        made = case(heads, tokens, starts, slots, head_dim, int8=int8, norm=norm)
        _, qkv, positions, inv_freq, factor, angles, k, v, options = made
        k_all, v_all, all_options = copies(k, v, options)
        together = decode.rope_and_attend(qkv, positions + tokens, angles, k_all, v_all, **all_options)
        assert together.isfinite().all()
        for b in range(len(starts)):
            row = slice(b, b + 1)
            own_k, own_v, own = copies(k[row], v[row], options)
            own |= {name: x[row] for name, x in own.items() if name.endswith("_scale")}
            for t in range(tokens):
                at = positions[row] + t
                one = rope_cache.rope_angles(at, 1, inv_freq, factor)
                alone = decode.rope_and_attend(qkv[row, t : t + 1], at + 1, one, own_k, own_v, **own)
                assert torch.equal(alone, together[row, :, t : t + 1])
            assert torch.equal(own_k.nan_to_num(), k_all[row].nan_to_num())
            assert torch.equal(own_v.nan_to_num(), v_all[row].nan_to_num())


@pytest.mark.parametrize("turn", plans.INTERPRETER.chunks.turns)
def test_rounds_of_drafts_over_a_turning_point(turn, products_row_by_row):  # noqa: F811
    """Every draft is right, and `accept` says how many of them count: the bits are those of one token after another."""
    width, begin, slots = 3, turn - 5, turn + 3
    steps = range(begin, begin + 8)
    _, qkv, _, inv_freq, factor, _, k, v, options = case((2, 1), len(steps), [begin], slots, 16)
    one_k, one_v, _ = copies(k, v, options)

    def attend(start, tokens, k, v):
        at = torch.tensor([start], dtype=torch.int32)
        angles = rope_cache.rope_angles(at, tokens, inv_freq, factor)
        return decode.rope_and_attend(qkv[:, start - begin :][:, :tokens], at + tokens, angles, k, v, **options)

    alone = torch.cat([attend(start, 1, one_k, one_v) for start in steps], dim=2)
    tokens, log = torch.zeros(1, slots + 1, dtype=torch.int32), torch.zeros(1, 2 + width, dtype=torch.int32)
    position, limit = torch.tensor([begin], dtype=torch.int32), torch.tensor([slots], dtype=torch.int32)
    added = []
    while (start := int(position)) + width <= steps.stop:
        together = attend(start, width, k, v)
        right = torch.ones(1, width, dtype=torch.int64)
        accept(tokens, position, limit, right[:, 1:].int(), right, log, plans.INTERPRETER.chunks.turns)
        added.append(int(position) - start)
        assert torch.equal(together[:, :, : added[-1]], alone[:, :, start - begin :][:, :, : added[-1]])
    assert added == [3, 2, 3]


def test_step_by_step_it_is_causal_attention():
    """Against the textbook over the whole sequence, from an empty cache on."""
    tokens = 40
    config, qkv, positions, inv_freq, factor, _, k, v, options = case((4, 2), tokens, [0], tokens, 16, norm=True)
    wanted = flash_attention(*by_the_model(config, (qkv, positions), options), backend="naive")
    done = 0
    for step in (1, 7, 1, 3, 20, 8):
        at = torch.tensor([done], dtype=torch.int32)
        angles = rope_cache.rope_angles(at, step, inv_freq, factor)
        out = decode.rope_and_attend(qkv[:, done : done + step], at + step, angles, k, v, **options)
        torch.testing.assert_close(out, wanted[:, :, done : done + step], rtol=1e-5, atol=1e-5)
        done += step


def test_half_precision():
    made = case((4, 2), 3, [60, 5], 100, 32, dtype=torch.float16)
    _, qkv, positions, inv_freq, factor, angles, k, v, options = made
    got = decode.rope_and_attend(qkv, positions + 3, angles, k, v, **options)
    q = rope_cache.launch(qkv, positions, inv_freq, k.clone(), v.clone(), attention_factor=factor, **options)
    torch.testing.assert_close(got.double(), exact(q, k, v, positions + 3), rtol=2e-3, atol=2e-3)


def test_angles_are_those_of_the_model():
    config = ModelConfig(10, n_head=2, n_embd=64, block_size=100_000, rope_scaling=YARN)
    (_, positions, inv_freq, *_), options = rope_inputs(config, [0, 99_990, -1], 3, 8)
    cos, sin = rope_cache.rope_angles(positions, 3, inv_freq, options["attention_factor"])
    angle = (positions[:, None] + torch.arange(3)).float()[..., None] * inv_freq
    assert options["attention_factor"] != 1
    torch.testing.assert_close(cos, angle.cos() * options["attention_factor"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sin, angle.sin() * options["attention_factor"], rtol=1e-5, atol=1e-6)


def test_refusals():
    *_, qkv, positions, _, _, (cos, sin), k, v, options = case((4, 2), 2, [0, 3], 8, 16)
    good = dict(qkv=qkv, lengths=positions + 2, angles=(cos, sin), k_cache=k, v_cache=v, **options)
    cases = [
        (dict(n_head=3), "qkv must be \\[B, T, 112\\]"),
        (dict(qkv=qkv.transpose(1, 2).contiguous().transpose(1, 2)), "last dimension contiguous"),
        (dict(lengths=positions.long()), "must be int32 \\[2\\]"),
        (dict(angles=(cos, sin[:1])), "angles must be fp32 \\[2, 2, 8\\]"),
        (dict(angles=(cos.half(), sin)), "angles must be fp32"),
        (dict(q_norm=torch.ones(16)), "q_norm and k_norm must both be \\[16\\]"),
        (dict(q_norm=torch.ones(8), k_norm=torch.ones(16)), "q_norm and k_norm must both"),
        (dict(k_cache=k[..., :15], v_cache=v[..., :15]), "even D"),
        (dict(k_cache=k.half(), v_cache=v.half()), "must both be torch.float32 like q"),
        (dict(window=0), "at least 1 key"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            decode.rope_and_attend(**good | change)
