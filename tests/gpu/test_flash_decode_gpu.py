"""Decoding attention on silicon: `python3 -m pytest -m gpu tests/gpu/test_flash_decode_gpu.py`.

What the CPU cannot show: bf16, bits that depend on no neighbour in a tensor core, kernels that overlap, keys that are
read in the kernel that wrote them, CUDA graphs, addresses past 2^31.
"""

import importlib
import itertools
import math
import multiprocessing
import os
from functools import partial

import pytest
import torch

from kernels import flash_decode, reference, rope_and_attend, rope_and_cache, rope_angles
from kernels import flash_decode_plan as plans
from kernels.round import accept
from model import ModelConfig, RMSNorm, apply_rope, rope_table
from rope import rope_frequencies

decode = importlib.import_module("kernels.flash_decode")  # the module: the package's name is the function

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = [(8, 8), (8, 2), (32, 8), (32, 1), (12, 4)]
SLOTS = (200, 3000, 20_000)  # room of a cache: chunks that are combined in one run, in two and in several


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
    keys = decode.plan_for(8, 64, 2, torch.device("cuda", 0)).keys
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


@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
def test_two_graphs_at_once(int8):
    """Replayed on two streams, each with its own partial results."""
    cases = [inputs((32, 8), 1, [3000 - 700 * i], 3000, 128, seed=i, int8=int8) for i in range(2)]
    wanted = [flash_decode(*tensors, **scales) for *tensors, scales in cases]
    graphs, outs, streams = [], [], [torch.cuda.Stream() for _ in cases]
    for *tensors, scales in cases:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append([flash_decode(*tensors, **scales) for _ in range(20)])
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for out, expected in zip(outs, wanted, strict=True) for x in out)


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


def step_inputs(heads, tokens, starts, slots, head_dim, dtype=BF16, int8=False, qk_norm=False, seed=0):
    """qkv, positions, inv_freq, caches with NaN from each position on (int8: in their scales), and the options of
    rope_and_cache."""
    generator = torch.Generator("cuda").manual_seed(seed)
    (H, G), B = heads, len(starts)
    _, k, v, _, scales = inputs(heads, 1, [max(start, 0) for start in starts], slots, head_dim, dtype, int8, seed)
    qkv = torch.randn(B, tokens, (H + 2 * G) * head_dim, device="cuda", generator=generator).to(dtype)
    config = ModelConfig(10, n_head=H, n_kv_head=G, n_embd=H * head_dim, head_dim=head_dim, block_size=slots)
    inv_freq, attention_factor = rope_frequencies(config, qkv.device)
    options = dict(n_head=H, eps=1e-6, **scales)
    if qk_norm:
        options |= {name: torch.rand(head_dim, device="cuda", generator=generator) for name in ("q_norm", "k_norm")}
    return qkv, torch.tensor(starts, dtype=torch.int32, device="cuda"), inv_freq, attention_factor, k, v, options


def own(k, v, options, row=slice(None)):
    """Caches of one's own, of one row if asked."""
    scales = {name: x[row].clone() for name, x in options.items() if name.endswith("_scale")}
    return k[row].clone(), v[row].clone(), options | scales


def same(a, b):
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


STEPS = [((32, 8), 128), ((32, 1), 128), ((12, 4), 64), ((8, 2), 80)]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("heads,head_dim", STEPS, ids=str)
def test_rope_and_attend_is_the_two_kernels(heads, head_dim, int8, qk_norm):
    slots = 3000
    for tokens, window in ((1, None), (5, None), (17, 100)):
        starts = [0, 1, 63, 64, 127, 1983, 2600, slots - tokens, -1, slots - 1]
        qkv, at, inv_freq, factor, k, v, options = step_inputs(
            heads, tokens, starts, slots, head_dim, int8=int8, qk_norm=qk_norm
        )
        other_k, other_v, other = own(k, v, options)
        q = rope_and_cache(qkv, at, inv_freq, k, v, attention_factor=factor, **options)
        scales = {name: x for name, x in options.items() if name.endswith("_scale")}
        wanted = flash_decode(q, k, v, at + tokens, window=window, **scales)
        angles = rope_angles(at, tokens, inv_freq, factor)
        got = rope_and_attend(qkv, at + tokens, angles, other_k, other_v, window=window, **other)
        inside = (at >= 0) & (at + tokens <= slots)
        assert got[inside].isfinite().all()
        assert same(other_v, v) and all(same(other[name], scales[name]) for name in scales if name == "v_scale")
        if qk_norm:
            torch.testing.assert_close(got[inside], wanted[inside], rtol=2e-2, atol=2e-2)
            assert int8 or ((other_k != k) & ~k.isnan()).float().mean() < 1e-3
        else:
            assert same(other_k, k) and all(same(other[name], scales[name]) for name in scales)
            assert torch.equal(got[inside], wanted[inside])


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("heads,head_dim", STEPS, ids=str)
def test_steps_of_one_token_are_a_step_of_many(heads, head_dim, int8, qk_norm):
    """Bit for bit, the caches too; in a batch, and in a captured graph that the token before has just left."""
    tokens, slots, starts = 16, 5000, [4900, 70, 700]
    qkv, at, inv_freq, factor, k, v, options = step_inputs(
        heads, tokens, starts, slots, head_dim, int8=int8, qk_norm=qk_norm
    )
    k_all, v_all, own_options = own(k, v, options)
    together = rope_and_attend(qkv, at + tokens, rope_angles(at, tokens, inv_freq, factor), k_all, v_all, **own_options)
    assert together.isfinite().all()
    angles = rope_angles(at, tokens, inv_freq, factor)
    for b in range(len(starts)):
        row = slice(b, b + 1)
        one_k, one_v, one = own(k, v, options, row)
        lengths = [at[row] + t + 1 for t in range(tokens)]
        turned = [tuple(x[row, t : t + 1].contiguous() for x in angles) for t in range(tokens)]

        calls = [
            partial(rope_and_attend, qkv[row, t : t + 1], lengths[t], turned[t], one_k, one_v, **one)
            for t in range(tokens)
        ]
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call() for call in calls]
        graph.replay()
        for t in range(tokens):
            assert torch.equal(outs[t], together[row, :, t : t + 1]), (b, t)
        assert same(one_k, k_all[row]) and same(one_v, v_all[row])


TURNS = [((32, 8), 128, False), ((32, 8), 128, True), ((32, 1), 128, False), ((12, 4), 64, False)]


@pytest.mark.parametrize("heads,head_dim,int8", TURNS, ids=str)
def test_every_kind_of_chunk(heads, head_dim, int8):
    """On both sides of every turning point, in the middle of what lies between, and tokens across it."""
    for turn, tokens in itertools.product(plans.turning_points(heads[1], head_dim), (1, 5)):
        lengths = [turn - 1 + tokens, turn + tokens, turn + turn // 2]
        if heads[1] > 1 or turn < 100_000:  # the textbook wants more memory than the kernel
            *tensors, scales = inputs(heads, tokens, lengths, lengths[-1], head_dim, int8=int8)
            check(flash_decode(*tensors, **scales), *tensors, **scales)


@pytest.mark.parametrize("heads,head_dim,int8", TURNS, ids=str)
def test_rounds_of_drafts_over_every_turning_point(heads, head_dim, int8):
    """Every draft is right, and `accept` says how many of them count: the bits are those of one token after another."""
    turns, width, tokens = plans.turning_points(heads[1], head_dim), 5, 12
    right = torch.ones(1, width, dtype=torch.int64, device="cuda")
    for turn in turns:
        begin, slots = turn - 7, turn + 5
        qkv, at, inv_freq, factor, k, v, options = step_inputs(heads, tokens, [begin], slots, head_dim, int8=int8)
        one_k, one_v, one = own(k, v, options)

        def attend(first, count, k, v, options, qkv=qkv, at=at, inv_freq=inv_freq, factor=factor):
            angles = rope_angles(at + first, count, inv_freq, factor)
            return rope_and_attend(qkv[:, first : first + count], at + first + count, angles, k, v, **options)

        alone = torch.cat([attend(t, 1, one_k, one_v, one) for t in range(tokens)], dim=2)
        text, log = (
            torch.zeros(1, slots + 1, dtype=torch.int32, device="cuda"),
            torch.zeros_like(at).repeat(1, 2 + width),
        )
        position, added = at.clone(), []
        while (first := sum(added)) + width <= tokens:
            together = attend(first, width, k, v, options)
            accept(text, position, torch.full_like(at, slots), right[:, 1:].int(), right, log, turns)
            added.append(int(position - at) - first)
            kept = slice(first, first + added[-1])
            assert torch.equal(together[:, :, : added[-1]], alone[:, :, kept]), (turn, first)
        assert added == [5, 2, 5]
        assert same(one_k, k) and same(one_v, v)
