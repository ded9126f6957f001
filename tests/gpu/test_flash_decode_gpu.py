"""Decoding attention on silicon: `python3 -m pytest -m gpu tests/gpu/test_flash_decode_gpu.py`.

What the CPU cannot show: bf16, bits that depend on no neighbour in a tensor core, programs that race to combine, CUDA
graphs, addresses past 2^31.
"""

import importlib
import itertools
import math
import multiprocessing
import os

import pytest
import torch

from kernels import flash_decode, reference, rope_and_cache
from model import ModelConfig, RMSNorm, apply_rope, rope_table
from rope import rope_frequencies

decode = importlib.import_module("kernels.flash_decode")  # the module: the package's name is the function

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = [(8, 8), (8, 2), (32, 8), (32, 1), (12, 4)]
# Room of a cache: one chunk, chunks that the last program combines, chunks that a second kernel combines.
SLOTS = (200, 3000, 20_000)


TOKENS = (1, 2, 5, 9, 17)
COMPANY = [((32, 8), 128, None), ((32, 1), 128, None), ((12, 4), 64, 150), ((8, 8), 64, None)]


def kernels():
    """Heads, tokens, head_dim, window, rows: what the larger tests below make Triton compile."""
    for heads, tokens, window in itertools.product(HEADS, TOKENS, (None, 100)):
        yield heads, tokens, 64, window, 7
    for (heads, head_dim, window), tokens, rows in itertools.product(COMPANY, (1, 5, 17), (1, 4)):
        yield heads, tokens, head_dim, window, rows


def compile_kernels(kernel):
    """In a process of the pool, into Triton's cache."""
    heads, tokens, head_dim, window, rows = kernel
    for slots, int8 in itertools.product(SLOTS, (False, True)):
        *tensors, scales = inputs(heads, tokens, [1] * rows, slots, head_dim, int8=int8)
        flash_decode(*tensors, window=window, **scales)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert torch.cuda.is_available(), "these tests need a GPU"
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "these tests are about the compiled kernels"
    processes = max(1, min(12, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        compiling = [pool.apply_async(compile_kernels, (kernel,)) for kernel in kernels()]
        for one in compiling:
            one.wait()  # and not get: what fails here fails again, by name, in its own test


def inputs(heads, tokens, lengths, slots, head_dim=64, dtype=BF16, int8=False, seed=0):
    """q, both caches with NaN in the slots past each length, cache_len, and the scales of int8 caches by name."""
    generator = torch.Generator("cuda").manual_seed(seed)
    (heads_q, heads_kv), batch = heads, len(lengths)

    def noise(*size):
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    q = noise(batch, heads_q, tokens, head_dim)
    caches = [noise(batch, heads_kv, slots, head_dim) for _ in "kv"]
    scales = {}
    if int8:
        caches, scales = zip(*(reference.quantize_heads(x) for x in caches), strict=True)
        scales = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    for b, length in enumerate(lengths):
        for x in scales.values() if int8 else caches:
            x[b, :, length:] = math.nan
    return q, *caches, torch.tensor(lengths, dtype=torch.int32, device="cuda"), scales


def check(got, q, k, v, cache_len, window=None, k_scale=None, v_scale=None):
    """Against the textbook in fp64, row by row, over the valid part of the cache alone. A mean over n keys is about
    1 / sqrt(n), and so is what may be wrong with it: a tile too few is seen in the longest cache."""
    assert got.dtype == q.dtype and got.shape == q.shape
    relative, absolute = {BF16: (1e-2, 2.5e-2), FP16: (2e-3, 4e-3), FP32: (1e-4, 6e-5)}[q.dtype]
    for b, length in enumerate(cache_len.tolist()):
        keys, values = (x[b : b + 1, :, :length].double() for x in (k, v))
        if k_scale is not None:
            keys, values = keys * k_scale[b, :, :length, None], values * v_scale[b, :, :length, None]
        wanted = reference.attention(q[b : b + 1].double(), keys, values, window=window)[0]
        seen = max(1, min(length - q.shape[2] + 1, window or length))
        torch.testing.assert_close(got[b].double(), wanted, rtol=relative, atol=absolute / math.sqrt(seen))


@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("slots", SLOTS)
def test_heads_tokens_windows(slots, int8):
    keys = decode.plan_for(slots, 8, 64, 2, torch.device("cuda", 0)).keys
    edges = [0, 1, keys - 1, keys, keys + 1, 199, slots]
    for heads, tokens, window in itertools.product(HEADS, TOKENS, (None, 100)):
        arguments = inputs(heads, tokens, edges, slots, int8=int8)
        *tensors, scales = arguments
        check(flash_decode(*tensors, window=window, **scales), *tensors, window, **scales)


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_head_dims_and_dtypes(head_dim, dtype):
    for slots, tokens in ((3000, 1), (20_000, 5)):
        *tensors, _ = inputs((8, 2), tokens, [1, 777, slots], slots, head_dim, dtype)
        check(flash_decode(*tensors), *tensors)


@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("slots", SLOTS)
def test_bits_do_not_depend_on_company(slots, int8):
    lengths = [slots, 19, 130, slots // 2]
    for heads, head_dim, window in COMPANY:
        for tokens in (5, 17):
            *tensors, scales = inputs(heads, tokens, lengths, slots, head_dim, int8=int8)
            together = flash_decode(*tensors, window=window, **scales)
            q, k, v, cache_len = tensors
            for b in range(len(lengths)):
                row = slice(b, b + 1)
                own = {name: x[row] for name, x in scales.items()}
                alone = flash_decode(q[row], k[row], v[row], cache_len[row], window=window, **own)
                assert torch.equal(alone, together[row])
                for t in range(tokens):
                    length = cache_len[row] - (tokens - 1 - t)
                    one = flash_decode(q[row, :, t : t + 1], k[row], v[row], length, window=window, **own)
                    assert torch.equal(one, together[row, :, t : t + 1]), (heads, tokens, b, t)


def test_bits_do_not_depend_on_the_room_in_the_cache():
    for heads, head_dim, window in COMPANY:
        q, k, v, cache_len, _ = inputs(heads, 5, [180, 90], SLOTS[-1], head_dim)
        outs = [flash_decode(q, k[:, :, :slots], v[:, :, :slots], cache_len, window=window) for slots in SLOTS]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("slots", SLOTS)
def test_a_graph_captured_short_is_right_at_every_length(slots):
    q, k, v, cache_len, _ = inputs((32, 8), 2, [slots, slots], slots, 128)
    cache_len.fill_(3)
    flash_decode(q, k, v, cache_len)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_decode(q, k, v, cache_len)
    for length in (3, 2, 63, 64, 65, 199, slots - 1, slots, 5):
        cache_len.copy_(torch.tensor([length, max(2, length // 2)]))
        graph.replay()
        assert torch.equal(out, flash_decode(q, k, v, cache_len))
        check(out, q, k, v, cache_len)


@pytest.mark.parametrize("slots", SLOTS)
def test_100_times_the_same_bits(slots):
    """With the chip busy on another stream, so that programs arrive in another order each time."""
    *tensors, _ = inputs((32, 8), 1, [slots, slots // 3], slots, 128)
    wanted = flash_decode(*tensors)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for turn in range(100):
        if turn % 3 == 0:
            with torch.cuda.stream(other):
                noise = (noise @ noise).clamp(-1, 1)
        assert torch.equal(flash_decode(*tensors), wanted)
    assert not decode.arrival_counters(tensors[0].device).any()


def test_two_streams_at_once():
    cases = [inputs((32, 8), 1, [3000, 1000 + 500 * i], 3000, 128, seed=i)[:4] for i in range(2)]
    wanted = [flash_decode(*case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs = [[], []]
    for _ in range(50):
        for stream, case, out in zip(streams, cases, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(flash_decode(*case))
    torch.cuda.synchronize()
    for out, expected in zip(outs, wanted, strict=True):
        assert all(torch.equal(x, expected) for x in out)


def test_capture_before_any_call_says_what_to_do():
    *tensors, _ = inputs((32, 8), 1, [3000], 3000, 128)
    flash_decode(*tensors)
    kept, decode._COUNTERS = decode._COUNTERS, {}
    try:
        with pytest.raises(RuntimeError, match="call it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            flash_decode(*tensors)
    finally:
        decode._COUNTERS = kept
    torch.cuda.synchronize()


def test_addresses_past_2_to_the_31():
    """A cache of 2.2e9 elements; the last row of the batch begins past 2^31."""
    slots, batch = 70_000, 31
    q = torch.randn(batch, 8, 1, 128, device="cuda", dtype=BF16)
    k = torch.randn(batch, 8, slots, 128, device="cuda", dtype=BF16)
    assert k.numel() > 2**31
    cache_len = torch.full((batch,), slots, dtype=torch.int32, device="cuda")
    got = flash_decode(q, k, k, cache_len)
    last = slice(batch - 1, batch)
    check(got[last], q[last], k[last], k[last], cache_len[last])


@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_and_cache(head_dim, qk_norm, int8):
    H, G, T, S = 8, 2, 3, 100_000
    config = ModelConfig(10, n_head=H, n_kv_head=G, n_embd=H * head_dim, head_dim=head_dim, block_size=S)
    start = torch.tensor([0, 5, -1, S - 3, S - 1], dtype=torch.int32, device="cuda")
    B = len(start)
    qkv = torch.randn(B, T, (H + 2 * G) * head_dim, device="cuda", dtype=BF16)
    inv_freq, attention_factor = rope_frequencies(config, qkv.device)
    dtype = torch.int8 if int8 else BF16
    k_cache, v_cache = (torch.full((B, G, S, head_dim), 7, device="cuda", dtype=dtype) for _ in "kv")
    options = dict(n_head=H, eps=config.norm_eps, attention_factor=attention_factor)
    if int8:
        options |= {name: torch.full((B, G, S), 7.0, device="cuda") for name in ("k_scale", "v_scale")}
    q, k, v = qkv.view(B, T, -1, head_dim).transpose(1, 2).split([H, G, G], dim=1)
    if qk_norm:
        norms = [RMSNorm(head_dim, config.norm_eps).cuda() for _ in "qk"]
        for norm, name in zip(norms, ("q_norm", "k_norm"), strict=True):
            norm.weight.data.uniform_()
            options[name] = norm.weight.data.to(BF16).float()
            norm.weight.data.copy_(options[name])
        q, k = norms[0](q).detach(), norms[1](k).detach()
    position = start[:, None] + torch.arange(T, device="cuda")
    rope = rope_table(position, config)
    q, k = apply_rope(q, rope), apply_rope(k, rope)

    got = rope_and_cache(qkv, start, inv_freq, k_cache, v_cache, **options)
    torch.testing.assert_close(got, q, rtol=1e-2, atol=1e-2)
    for cache, name, new in ((k_cache, "k_scale", k), (v_cache, "v_scale", v)):
        stored = cache if not int8 else cache * options[name][..., None]
        written = torch.zeros(B, S, dtype=torch.bool, device="cuda")
        for b in range(B):
            for t in range(T):
                if start[b] >= 0 and position[b, t] < S:
                    slot = int(position[b, t])
                    written[b, slot] = True
                    bound = 1e-2 if not int8 else new[b, :, t].float().abs().max().item() / 127
                    torch.testing.assert_close(stored[b, :, slot].float(), new[b, :, t].float(), rtol=1e-2, atol=bound)
        assert (cache.transpose(1, 2)[~written] == 7).all()
