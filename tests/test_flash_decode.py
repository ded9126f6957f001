"""Decoding attention: the Triton kernels in the interpreter, their plain twins, and the dispatch between them."""

import importlib
import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from tests.attention_cases import DEVICE  # isort: skip

from kernels import flash_decode, reference
from kernels import flash_decode_plan as plans

decode = importlib.import_module("kernels.flash_decode")  # the module: the package's name is the function

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, tests/gpu/test_flash_decode_gpu.py")
HEADS = [(3, 3), (4, 2), (6, 2), (5, 1), (6, 1)]
EDGES = [0, 1, 31, 32, 33, 64, 65, 130]  # around the tile and the chunk (32, from position 96 on 64), and full
TURNS = plans.INTERPRETER.chunks.turns


@pytest.fixture(autouse=True)
def arithmetic_warnings_are_errors():
    """inf - inf and 0 / 0 warn in the interpreter before they turn up as NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def inputs(heads, tokens, lengths, slots, head_dim, dtype=torch.float32, int8=False, seed=0):
    """q, both caches with NaN in the slots past each length, cache_len, and the scales of int8 caches by name."""
    generator = torch.Generator().manual_seed(seed)
    (heads_q, heads_kv), batch = heads, len(lengths)
    q = torch.randn(batch, heads_q, tokens, head_dim, generator=generator).to(dtype)
    caches = [torch.randn(batch, heads_kv, slots, head_dim, generator=generator).to(dtype) for _ in "kv"]
    scales = {}
    if int8:
        caches, scales = zip(*(reference.quantize_heads(x) for x in caches), strict=True)
        scales = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    for b, length in enumerate(lengths):
        for x in scales.values() if int8 else caches:
            x[b, :, length:] = math.nan
    return q, *caches, torch.tensor(lengths, dtype=torch.int32), scales


def exact(q, k, v, lengths, window=None, k_scale=None, v_scale=None):
    """Row by row in fp64 by the textbook definition, over the valid part of the cache alone."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[b : b + 1, :, :length].double() for x in (k, v))
        if k_scale is not None:
            keys, values = keys * k_scale[b, :, :length, None], values * v_scale[b, :, :length, None]
        out[b] = reference.attention(q[b : b + 1].double(), keys, values, window=window)[0]
    return out


def uniform(keys):
    """Chunks of one length at all positions."""
    return plans.Chunks(keys, (2**26,) * len(plans.TURNS))


def tolerance(dtype):
    return dict(rtol=2e-5, atol=2e-5) if dtype == torch.float32 else dict(rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_edge_of_tile_and_chunk(heads, window):
    turn = HEADS.index(heads)
    tokens, head_dim = [1, 2, 5, 9, 17][(turn + (window or 0)) % 5], [16, 32, 24][turn % 3]
    dtype = [torch.float32, torch.float16][turn % 2]
    q, k, v, lengths, _ = inputs(heads, tokens, EDGES, 130, head_dim, dtype)
    wanted = exact(q, k, v, lengths, window)
    for run in (decode.launch, reference.flash_decode):
        got = run(q, k, v, lengths, window=window)
        assert got.dtype == dtype and got.shape == q.shape
        torch.testing.assert_close(got.double(), wanted, **tolerance(dtype))


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 256, 257, 700])
def test_one_chunk_then_several(slots):
    q, k, v, lengths, _ = inputs((4, 2), 2, [slots, max(slots - 1, 1), 0], slots, 16)
    torch.testing.assert_close(decode.launch(q, k, v, lengths).double(), exact(q, k, v, lengths), rtol=2e-5, atol=2e-5)


def test_no_plan_changes_the_result():
    q, k, v, lengths, _ = inputs((4, 2), 3, [70, 200], 200, 16)
    wanted = exact(q, k, v, lengths)
    for chunk, keys, programs in ((32, 16, 1), (64, 64, 40), (128, 32, 2)):
        plan = plans.Plan(uniform(chunk), keys, 4, 1, programs)
        torch.testing.assert_close(decode.launch(q, k, v, lengths, plan=plan).double(), wanted, rtol=2e-5, atol=2e-5)


def test_programs_share_the_work_without_changing_a_bit():
    """One program that does everything, and one for each chunk."""
    for slots, window in ((130, None), (300, 70)):
        q, k, v, lengths, _ = inputs((6, 2), 2, [slots, 33, 0], slots, 16)
        outs = [
            decode.launch(q, k, v, lengths, window=window, plan=plans.Plan(uniform(64), 16, 4, 1, programs))
            for programs in (1, 100)
        ]
        assert torch.equal(*outs)


@pytest.fixture
def products_row_by_row(monkeypatch):
    """The interpreter multiplies by NumPy, where a row's last bits depend on its place in the tile. They do not in a
    tensor core (tests/gpu shows it), so here every row is multiplied in the same way."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        rows = [np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
        return TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    "slots,window,int8", [(150, None, True), (150, 50, False), (270, None, False), (270, 50, True)]
)
def test_bits_do_not_depend_on_company(slots, window, int8, products_row_by_row):
    """A token alone, as one of several, in a batch or not: the same bits."""
    lengths = [slots, 72]  # none of them has tokens on both sides of a turning point
    for heads, tokens in (((4, 2), 5), ((6, 1), 3)):
        q, k, v, cache_len, scales = inputs(heads, tokens, lengths, slots, 16, int8=int8)
        together = decode.launch(q, k, v, cache_len, window=window, **scales)
        assert together.isfinite().all()
        for b in range(len(lengths)):
            row = slice(b, b + 1)
            own = {name: x[row] for name, x in scales.items()}
            alone = decode.launch(q[row], k[row], v[row], cache_len[row], window=window, **own)
            assert torch.equal(alone, together[row])
            for t in (0, tokens // 2, tokens - 1):
                length = cache_len[row] - (tokens - 1 - t)
                one = decode.launch(q[row, :, t : t + 1], k[row], v[row], length, window=window, **own)
                assert torch.equal(one, together[row, :, t : t + 1])


@pytest.mark.parametrize("tokens,window,int8", [(1, None, True), (2, 100, False), (5, None, False), (17, 300, True)])
def test_every_kind_of_chunk(tokens, window, int8):
    """On both sides of every turning point and in the middle of what lies between; one row's tokens across it."""
    assert len(TURNS) == 5 and all(b == 2 * a for a, b in itertools.pairwise(TURNS))
    starts = [turn + d for turn in TURNS for d in (-1, 0, turn // 2 - 1)]
    lengths = sorted({start + tokens for start in starts})
    q, k, v, cache_len, scales = inputs((1, 1), tokens, lengths, lengths[-1], 16, int8=int8)
    got = decode.launch(q, k, v, cache_len, window=window, **scales)
    torch.testing.assert_close(got.double(), exact(q, k, v, cache_len, window, **scales), **tolerance(q.dtype))


@pytest.mark.parametrize("turn", TURNS)
def test_before_a_turning_point_the_bits_are_those_of_a_token_alone(turn, products_row_by_row):
    """The round begins before it and ends behind it. What lies behind is right too, but in another order of sums."""
    tokens, length = 5, turn + 2
    q, k, v, cache_len, _ = inputs((4, 2), tokens, [length], length, 16)
    together = decode.launch(q, k, v, cache_len)
    torch.testing.assert_close(together.double(), exact(q, k, v, cache_len), **tolerance(q.dtype))
    for t in range(tokens):
        alone = decode.launch(q[:, :, t : t + 1], k, v, cache_len - (tokens - 1 - t))
        assert torch.equal(alone, together[:, :, t : t + 1]) == (length - tokens + t < turn)


def test_int8_cache():
    """Against the exact attention over the dequantised cache; and, within what 8 bits can do, over the cache as it
    was before."""
    cases = [((4, 4), 1, None, torch.float32), ((4, 2), 3, 30, torch.float16), ((6, 1), 5, None, torch.float32)]
    for heads, tokens, window, dtype in cases:
        q, k, v, lengths, scales = inputs(heads, tokens, EDGES, 130, 32, dtype, int8=True)
        wanted = exact(q, k, v, lengths, window, **scales)
        for run in (decode.launch, reference.flash_decode):
            got = run(q, k, v, lengths, window=window, **scales)
            torch.testing.assert_close(got.double(), wanted, **tolerance(dtype))
        before = inputs(heads, tokens, EDGES, 130, 32, dtype)
        error = (wanted - exact(*before[:4], window)).abs().max()
        # An entry moves by at most half of 1/127 of the largest of its vector, here below 5 standard deviations.
        assert 0 < error < 0.06


def test_quantized_heads_round_trip():
    x = torch.cat([torch.randn(50, 32), torch.zeros(1, 32), 1e-30 * torch.randn(1, 32), 1e30 * torch.randn(1, 32)])
    quantized, scale = reference.quantize_heads(x)
    assert quantized.abs().amax(dim=1).tolist() == [127] * 50 + [0] + [127] * 2
    assert ((quantized * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()


def test_any_strides():
    q, k, v, lengths, _ = inputs((4, 2), 3, [70, 9], 80, 16)
    wanted = decode.launch(q, k, v, lengths)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = torch.stack([k, v], dim=2).transpose(2, 3).contiguous().transpose(2, 3).unbind(2)
    assert torch.equal(decode.launch(q, k, v, lengths), wanted)
    assert decode.launch(q, k, v, lengths).transpose(1, 2).is_contiguous()  # so that merging the heads is free


def test_dirty_buffers():
    """Partial results start as NaN."""
    q, k, v, lengths, _ = inputs((4, 2), 2, [200, 100], 200, 16)
    wanted = exact(q, k, v, lengths)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        got = decode.launch(q, k, v, lengths)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-5)


def test_a_length_out_of_range_reads_nothing_outside():
    q, k, v, _, _ = inputs((2, 1), 1, [64, 64], 64, 16)
    lengths = torch.tensor([1000, -5], dtype=torch.int32)
    wanted = exact(q, k, v, torch.tensor([64, 0]))
    torch.testing.assert_close(decode.launch(q, k, v, lengths).double(), wanted, rtol=2e-5, atol=2e-5)


def test_dispatch_on_the_cpu_is_the_definition():
    q, k, v, lengths, scales = inputs((4, 2), 2, [50, 7], 64, 16, int8=True)
    assert torch.equal(flash_decode(q, k, v, lengths, **scales), reference.flash_decode(q, k, v, lengths, **scales))


def test_plans_fit():
    for shared_memory in (232_448, 166_912, 101_376):
        for head_dim, size in itertools.product((16, 64, 128, 256), (1, 2, 4)):
            for heads_kv in (1, 2, 3, 4, 8, 16, 32, 64):
                plan = plans.plan_for_chip(heads_kv, head_dim, size, shared_memory)
                assert plan.chunks.turns == plans.turning_points(heads_kv, head_dim)
                assert plan.chunks.shortest % plan.keys == 0 and plan.keys >= 16 and plan.programs >= 1
                assert (plan.stages - 1) * plan.keys * head_dim * 2 * size < shared_memory


@pytest.mark.parametrize("heads_kv", [1, 2, 3, 4, 5, 8, 16, 32])
def test_between_the_turning_points_the_chip_is_occupied(heads_kv):
    """Of 128 channels: a row has 96 to 512 chunks, and one more a head where its last tokens begin another one."""
    turns = plans.turning_points(heads_kv, 128)
    assert len(turns) == 5 and turns[0] == 12_288 // heads_kv
    for i, turn in enumerate(turns):
        for start in (turn - 1, turn):
            count = -(-(start + 1) // (64 << i + (start == turn))) * heads_kv
            assert 96 - heads_kv <= count <= 512 + heads_kv
    room = plans.Chunks(plans.SHORTEST, turns).room
    assert room(2 * turns[-1], 17) <= 512 // heads_kv + 2


@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_room_for_every_length(tokens):
    for heads_kv in (1, 2, 8):
        chunks = plans.Chunks(plans.SHORTEST, plans.turning_points(heads_kv, 128))
        for slots in (17, 128, 129, 2048, 2060, 5000, 16_000, 60_000):
            counts = []
            for length in range(tokens, slots + 1):
                doubled = sum(length - tokens >= turn for turn in chunks.turns)
                counts.append(-(-length // (chunks.shortest << doubled)))
            assert chunks.room(slots, tokens) == max(counts)


def test_bits_do_not_depend_on_the_room_in_the_cache():
    """Chunks that are merged in one run, in two and in four."""
    length, plan = 60, plans.Plan(uniform(16), 16, 4, 1, 1)
    for heads, tokens, window in (((4, 2), 3, None), ((3, 1), 1, 20)):
        q, k, v, lengths, _ = inputs(heads, tokens, [length], length, 16)
        wanted = decode.launch(q, k, v, lengths, window=window, plan=plan)
        for slots in (130, 32 * 16 + 1, 32 * 16 * 3):
            room = [torch.full((1, heads[1], slots, 16), math.nan) for _ in "kv"]
            for new, old in zip(room, (k, v), strict=True):
                new[:, :, :length] = old
            assert torch.equal(decode.launch(q, *room, lengths, window=window, plan=plan), wanted)


def test_a_row_of_one_chunk_has_the_bits_that_combining_gives():
    """Its result is stored at once; beside a longer row there is room for more chunks, and 32 keys more make two."""
    q, k, v, lengths, _ = inputs((4, 2), 2, [30, 100], 100, 16)
    plan = plans.Plan(uniform(32), 32, 4, 1, 2)
    got = decode.launch(q, k, v, lengths, plan=plan)
    alone = decode.launch(q[:1], k[:1, :, :32], v[:1, :, :32], lengths[:1], plan=plan)
    assert torch.equal(got[:1], alone)
    halves = decode.launch(q[:1], k[:1], v[:1], lengths[:1], plan=plans.Plan(uniform(16), 16, 4, 1, 2))
    torch.testing.assert_close(got[:1], halves, rtol=2e-5, atol=2e-5)


def test_many_runs_of_chunks():
    plan, slots = plans.Plan(uniform(16), 16, 4, 1, 8), 1100  # 69 chunks in 3 runs of 32
    for window in (None, 600):
        q, k, v, lengths, _ = inputs((2, 1), 2, [slots, 520, 513, 0], slots, 16)
        got = decode.launch(q, k, v, lengths, window=window, plan=plan)
        torch.testing.assert_close(got.double(), exact(q, k, v, lengths, window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("head_dim", [72, 76, 80, 128])
def test_int8_read_as_words(head_dim):
    """Four channels at a time; a cache that is not aligned to words is read byte by byte, to the same result."""
    q, k, v, lengths, scales = inputs((6, 2), 3, [70, 33, 0], 80, head_dim, int8=True)
    assert decode.as_words(v) is not None
    got = decode.launch(q, k, v, lengths, **scales)
    torch.testing.assert_close(got.double(), exact(q, k, v, lengths, **scales), rtol=2e-5, atol=2e-5)
    odd = torch.empty(v.numel() + 1, dtype=torch.int8)[1:].view(v.shape).copy_(v)
    assert decode.as_words(odd) is None
    torch.testing.assert_close(decode.launch(q, k, odd, lengths, **scales), got, rtol=1e-5, atol=1e-6)


def test_refusals():
    q, k, v, lengths, _ = inputs((4, 2), 2, [8, 5], 8, 16)
    int8 = torch.zeros(2, 2, 8, 16, dtype=torch.int8)
    scale = torch.ones(2, 2, 8)
    cases = [
        (dict(q=q[0]), "must be \\[B, H_q, T, D\\]"),
        (dict(v_cache=v[:, :, :4]), "both caches"),
        (dict(k_cache=k[:1], v_cache=v[:1]), "to fit q"),
        (dict(q=q[:, :3]), "3 query heads cannot share 2 KV heads; \\[1, 3\\] would fit"),
        (dict(cache_len=lengths.long()), "must be int32 \\[2\\]"),
        (dict(cache_len=lengths[:1]), "must be int32 \\[2\\]"),
        (dict(q=q.half()), "must both be torch.float16 like q, or int8"),
        (dict(k_cache=int8), "must both be"),
        (dict(k_cache=int8, v_cache=int8), "k_scale goes with int8"),
        (dict(k_cache=int8, v_cache=int8, k_scale=scale), "v_scale goes with int8"),
        (dict(k_scale=scale, v_scale=scale), "k_scale goes with int8"),
        (dict(k_cache=int8, v_cache=int8, k_scale=scale[:1], v_scale=scale), "k_scale must be float32 \\[2, 2, 8\\]"),
        (dict(k_cache=k.transpose(2, 3).contiguous().transpose(2, 3)), "last dimension of the caches"),
        (dict(q=q.to("meta")), "must be on meta"),
        (dict(scale=0.0), "positive number"),
        (dict(window=0), "at least 1 key"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            flash_decode(**{"q": q, "k_cache": k, "v_cache": v, "cache_len": lengths, **change})
