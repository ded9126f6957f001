"""rope_and_cache: the kernel in the interpreter and its plain twin, against what the model does."""

import pytest
import torch

from tests.attention_cases import DEVICE  # isort: skip

from kernels import flash_attention, flash_decode, reference, rope_and_cache, rope_cache
from model import ModelConfig, RMSNorm, apply_rope, rope_table
from rope import rope_frequencies
from tests.test_flash_decode import arithmetic_warnings_are_errors  # noqa: F401

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, tests/gpu/test_flash_decode_gpu.py")


def rope_inputs(config, positions, tokens, slots, dtype=torch.float32, int8=False, seed=0):
    """The arguments of rope_and_cache, caches filled with a mark (7) that shows what was not written."""
    generator = torch.Generator().manual_seed(seed)
    H, G, D, batch = config.n_head, config.n_kv_head, config.head_dim, len(positions)
    qkv = torch.randn(batch, tokens, (H + 2 * G) * D, generator=generator).to(dtype)
    inv_freq, attention_factor = rope_frequencies(config, torch.device("cpu"))
    caches = [torch.full((batch, G, slots, D), 7, dtype=torch.int8 if int8 else dtype) for _ in "kv"]
    options = dict(n_head=H, eps=config.norm_eps, attention_factor=attention_factor)
    if config.qk_norm:
        options |= {name: torch.rand(D, generator=generator) for name in ("q_norm", "k_norm")}
    if int8:
        options |= {name: torch.full((batch, G, slots), 7.0) for name in ("k_scale", "v_scale")}
    return (qkv, torch.tensor(positions, dtype=torch.int32), inv_freq, *caches), options


def by_the_model(config, arguments, options):
    """q, k and v [B, heads, T, D] as model.Attention makes them."""
    qkv, positions = arguments[:2]
    batch, tokens, _ = qkv.shape
    heads = qkv.view(batch, tokens, -1, config.head_dim).transpose(1, 2)
    q, k, v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], dim=1)
    if config.qk_norm:
        for x, name in ((q, "q_norm"), (k, "k_norm")):
            norm = RMSNorm(config.head_dim, config.norm_eps)
            norm.weight.data = options[name]
            q, k = (norm(x).detach(), k) if name == "q_norm" else (q, norm(x).detach())
    rope = rope_table(positions[:, None] + torch.arange(tokens), config)
    return apply_rope(q, rope), apply_rope(k, rope), v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "change", [dict(), dict(qk_norm=True), dict(n_kv_head=1, head_dim=24), dict(rope_scaling="yarn:4:64", n_kv_head=6)]
)
def test_rope_and_cache_is_what_the_model_does(change, dtype):
    config = ModelConfig(**dict(vocab_size=10, n_head=6, n_kv_head=2, n_embd=96, block_size=100_000) | change)
    tokens, slots = 3, 60
    positions = [0, 17, 57, -1, 58, 60]  # the last row fits, is padding, fits but for one token, does not fit
    arguments, options = rope_inputs(config, positions, tokens, slots, dtype)
    q, k, v = by_the_model(config, arguments, options)
    for run in (rope_cache.launch, reference.rope_and_cache):
        k_cache, v_cache = (x.clone() for x in arguments[3:])
        got = run(*arguments[:3], k_cache, v_cache, **options)
        assert got.dtype == dtype and got.shape == q.shape
        torch.testing.assert_close(got, q, rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=2e-6)
        for cache, new in ((k_cache, k), (v_cache, v)):
            wanted = torch.full_like(cache, 7)
            for b, position in enumerate(positions):
                for t in range(tokens):
                    if position >= 0 and position + t < slots:
                        wanted[b, :, position + t] = new[b, :, t]
            torch.testing.assert_close(cache, wanted, rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=2e-6)


def test_rope_at_large_positions():
    """fp32 angles: at position 99,999 the fastest channel has turned 16,000 times."""
    config = ModelConfig(vocab_size=10, n_head=2, n_embd=32, block_size=100_000)
    arguments, options = rope_inputs(config, [99_998], 2, 100_000)
    q, k, _ = by_the_model(config, arguments, options)
    torch.testing.assert_close(rope_cache.launch(*arguments, **options), q, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(arguments[3][:, :, -2:], k, rtol=1e-5, atol=2e-6)
    assert (arguments[3][:, :, :-2] == 7).all()


def test_rope_and_cache_quantises():
    config = ModelConfig(vocab_size=10, n_head=4, n_kv_head=2, n_embd=64, block_size=100, qk_norm=True)
    positions = [5, -1, 39]
    arguments, options = rope_inputs(config, positions, 2, 40, int8=True)
    _, k, v = by_the_model(config, arguments, options)
    for run in (rope_cache.launch, reference.rope_and_cache):
        caches = [x.clone() for x in arguments[3:]]
        own = {name: x.clone() if name.endswith("_scale") else x for name, x in options.items()}
        run(*arguments[:3], *caches, **own)
        for cache, scale, new in ((caches[0], own["k_scale"], k), (caches[1], own["v_scale"], v)):
            quantized, wanted_scale = reference.quantize_heads(new)
            torch.testing.assert_close(scale[0, :, 5:7], wanted_scale[0])
            assert (cache[0, :, 5:7].int() - quantized[0].int()).abs().max() <= 1  # a tie may fall to either side
            back = cache[2, :, 39] * scale[2, :, 39, None]
            assert ((back - new[2, :, 0]).abs() <= 0.501 * scale[2, :, 39, None]).all()
            assert (cache[1] == 7).all() and (scale[1] == 7).all() and (scale[2, :, :39] == 7).all()


def test_rope_bits_do_not_depend_on_company():
    config = ModelConfig(vocab_size=10, n_head=4, n_kv_head=2, n_embd=64, block_size=100, qk_norm=True)
    arguments, options = rope_inputs(config, [3, 40, 11], 5, 50)
    together = rope_cache.launch(*arguments, **options)
    qkv, positions, inv_freq, k_cache, v_cache = arguments
    for b, t in ((0, 0), (1, 4), (2, 2)):
        caches = [torch.full_like(x[b : b + 1], 7) for x in (k_cache, v_cache)]
        alone = rope_cache.launch(qkv[b : b + 1, t : t + 1], positions[b : b + 1] + t, inv_freq, *caches, **options)
        assert torch.equal(alone, together[b : b + 1, :, t : t + 1])
        slot = int(positions[b]) + t
        assert torch.equal(caches[0][0, :, slot], k_cache[b, :, slot])
        assert torch.equal(caches[1][0, :, slot], v_cache[b, :, slot])


def test_a_token_written_is_a_token_attended():
    """The two together, step by step, against causal attention over the whole sequence."""
    config = ModelConfig(vocab_size=10, n_head=4, n_kv_head=2, n_embd=64, block_size=100)
    tokens = 20
    arguments, options = rope_inputs(config, [0], tokens, tokens)
    q, k, v = by_the_model(config, arguments, options)
    wanted = flash_attention(q, k, v, backend="naive")
    qkv, _, inv_freq, k_cache, v_cache = arguments
    done = 0
    for step in (1, 7, 1, 3, 8):
        new = slice(done, done + step)
        position = torch.tensor([done], dtype=torch.int32)
        q = rope_and_cache(qkv[:, new], position, inv_freq, k_cache, v_cache, **options)
        out = flash_decode(q, k_cache, v_cache, position + step)
        torch.testing.assert_close(out, wanted[:, :, new], rtol=1e-5, atol=1e-5)
        done += step


def test_rope_refusals():
    config = ModelConfig(vocab_size=10, n_head=4, n_kv_head=2, n_embd=64, block_size=100)
    (qkv, positions, inv_freq, k_cache, v_cache), options = rope_inputs(config, [0, 1], 2, 8)
    good = dict(qkv=qkv, positions=positions, inv_freq=inv_freq, k_cache=k_cache, v_cache=v_cache, n_head=4)
    scale = torch.ones(2, 2, 8)
    cases = [
        (dict(n_head=3), "qkv must be \\[2, T, 112\\] for 3 query heads"),
        (dict(v_cache=v_cache[:, :, :4]), "caches must be"),
        (dict(positions=positions.long()), "positions must be torch.int32 \\[2\\]"),
        (dict(inv_freq=inv_freq[:4]), "inv_freq must be torch.float32 \\[8\\]"),
        (dict(q_norm=torch.ones(16)), "go together"),
        (dict(q_norm=torch.ones(8), k_norm=torch.ones(16)), "q_norm must be a tensor \\[16\\]"),
        (dict(k_scale=scale, v_scale=scale), "go with int8 caches"),
        (dict(k_cache=k_cache.half()), "must both be torch.float32 like qkv"),
        (dict(inv_freq=inv_freq.to("meta")), "must be on cpu"),
        (dict(qkv=qkv.transpose(1, 2).contiguous().transpose(1, 2)), "must be contiguous"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            rope_and_cache(**good | change)
