"""Attention on silicon: `python3 -m pytest -m gpu tests/gpu/test_attention_gpu.py -s`.

What the CPU cannot show: bf16, the wgmma and TMA paths, races, addresses past 2^31, memory, and which kernels run.
The cases compile about 150 kernels; a pool of processes does that first, into Triton's cache.
"""

import math
import multiprocessing
import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.attention_cases import HEADS, LAYOUTS, MASKS, Case, check, inputs, run  # isort: skip

from kernels import choose_backend, describe_backend, flash_attention, reference, tiles

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [
    (1, 1), (3, 3), (1, 239), (239, 1), (3, 799), (799, 3), (64, 32), (64, 128), (113, 203), (113, 128), (128, 217),
    (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048), (4224, 4224),
]  # fmt: skip
SHORT = [pair for pair in LENGTHS if max(pair) <= 1024]


def kinds():
    """The combinations of head_dim, dtype and mask; each is a kernel of its own to compile."""
    yield from ((d, BF16, mask) for d in (64, 128) for mask in MASKS)
    yield from ((d, BF16, mask) for d in (16, 32, 40, 80, 96, 192, 256) for mask in ("full", "causal"))
    yield from ((d, FP16, mask) for d in (64, 128) for mask in ("full", "causal", "window+documents"))
    yield from ((d, FP32, mask) for d in (32, 64) for mask in ("causal", "window+documents"))


def cases(lengths, per_kind):
    """`per_kind` cases of each kind; lengths, heads, layout and batch take turns, each at its own pace."""
    turn = 0
    for head_dim, dtype, mask in kinds():
        for _ in range(per_kind):
            yield Case(
                heads=HEADS[turn % len(HEADS)],
                tokens=lengths[(turn * 5) % len(lengths)],
                head_dim=head_dim,
                dtype=dtype,
                mask=mask,
                layout=LAYOUTS[(turn // 2) % len(LAYOUTS)],
                batch=1 + turn % 3,
            )
            turn += 1


FORWARD = list(cases(LENGTHS, 13))
BACKWARD = list(cases(SHORT, 5))
passed = {"forward": 0, "backward": 0}


def compile_kind(kind):
    """In a process of the pool: both ways of loading tiles, forward and backward."""
    head_dim, dtype, mask = kind
    for layout in ("bthd", "offset"):
        for heads in ((2, 2), (2, 1)):  # the second cuts its group and sums in fp32
            (q, k, v), dout, options = inputs(Case(heads, (70, 70), head_dim, dtype, mask, layout), "cuda")
            run(q, k, v, dout, options)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert torch.cuda.is_available(), "these tests need a GPU"
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "these tests are about the compiled kernels"
    processes = max(1, min(12, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        compiling = [pool.apply_async(compile_kind, (kind,)) for kind in kinds()]
        for one in compiling:
            one.wait()  # and not get: what fails here fails again, by name, in its own test
    yield
    print(
        f"\nattention, {torch.cuda.get_device_name()}: "
        f"{passed['forward']} forward and {passed['backward']} backward cases passed"
    )


@pytest.fixture(autouse=True)
def dirty_memory():
    """Whatever the allocator hands out next has NaN in it."""
    home = torch.full((64, 1024, 1024), math.nan, device="cuda")
    del home


def test_the_kernels_are_chosen():
    """A fallback on a GPU is a failure."""
    for head_dim, dtype in ((64, BF16), (128, BF16), (256, FP16), (64, FP32)):
        print(describe_backend("cuda", head_dim, dtype))
        assert choose_backend("cuda", 0, head_dim, dtype) == "triton"


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward(case):
    check(case, "cuda", backward=False)
    passed["forward"] += 1


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_backward(case):
    check(case, "cuda")
    passed["backward"] += 1


def test_enough_cases():
    assert len(FORWARD) >= 400 and len(BACKWARD) >= 150


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window+documents"])
def test_thousand_repeats_are_bit_equal(head_dim, mask):
    case = Case((8, 2), (512, 512), head_dim, BF16, mask, "bthd", batch=8)
    (q, k, v), dout, options = inputs(case, "cuda")

    def once():
        out = flash_attention(q, k, v, backend="triton", **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    first = once()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for got, wanted in zip(once(), first, strict=True):
            different += (got != wanted).sum()
    assert different.item() == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_logits(head_dim):
    for dtype, bound in ((BF16, 5e-2), (FP16, 2e-2)):
        (q, k, v), dout, options = inputs(Case((4, 2), (512, 512), head_dim, dtype), "cuda")
        q, k = ((x.detach() * 6).requires_grad_() for x in (q, k))
        out = reference.attention(*(x.float() for x in (q, k, v)), **options)
        expected = [out, *torch.autograd.grad(out, (q, k, v), dout.float())]
        for got, wanted in zip(run(q, k, v, dout, options), expected, strict=True):
            assert got.isfinite().all()
            assert (got - wanted).abs().max() <= bound * wanted.abs().max()


def test_packed_documents_equal_separate_ones():
    lengths = [1, 400, 7, 640, 1000]
    (q, k, v), dout, _ = inputs(Case((8, 2), (2048, 2048), 64, BF16), "cuda")
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    doc_start = starts.repeat_interleave(torch.tensor(lengths))[None].to("cuda", torch.int32)
    packed = run(q, k, v, dout, dict(doc_start=doc_start))
    pieces = [x.detach().split(lengths, dim=2) for x in (q, k, v)]
    separate = [
        run(*(p[i].requires_grad_() for p in pieces), dout.split(lengths, dim=2)[i], {}) for i in range(len(lengths))
    ]
    for got, parts in zip(packed, zip(*separate, strict=True), strict=True):
        torch.testing.assert_close(got, torch.cat(parts, dim=2), rtol=2e-2, atol=2e-2)


def test_addresses_past_two_to_the_31():
    """B * H * T * D > 2^31 elements in each of q, k and v: heads beyond that must equal the same heads alone."""
    batch, heads, tokens, dim = 5, 16, 262_144 // 2, 224
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, heads, tokens, dim, device="cuda", dtype=BF16, generator=generator) for _ in range(3))
    assert q.numel() > 2**31
    dout = torch.randn(1, 1, tokens, dim, device="cuda", dtype=BF16, generator=generator)
    options = dict(window=256)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, backend="triton", **options)
    grads = torch.autograd.grad(out, leaves, dout.expand_as(out))
    for b, h in ((0, 0), (4, 14), (4, 15)):
        alone = [x.detach()[b : b + 1, h : h + 1].clone().requires_grad_() for x in leaves]
        expected = flash_attention(*alone, backend="triton", **options)
        wanted = [expected, *torch.autograd.grad(expected, alone, dout)]
        for got, right in zip((out, *grads), wanted, strict=True):
            assert torch.equal(got[b : b + 1, h : h + 1], right)
    # One row longer than 2^31 elements apart: a `[B, T, H, D]` tensor of one batch.
    del q, k, v, leaves, out, grads
    torch.cuda.empty_cache()
    q = torch.randn(1, tokens, 130, 128, device="cuda", dtype=BF16, generator=generator).transpose(1, 2)
    assert (tokens - 1) * q.stride(2) > 2**31
    out = flash_attention(q, q[:, :1], q[:, :1], backend="triton", **options)
    alone = q[:, 129:130].contiguous()
    first = q[:, :1].contiguous()
    assert torch.equal(out[:, 129:130], flash_attention(alone, first, first, backend="triton", **options))


def test_many_heads():
    """B * H beyond 65,535, the limit of a grid's second dimension."""
    q, k, v = (torch.randn(70_000, 1, 16, 16, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    out = flash_attention(q, k, v, backend="triton")
    torch.testing.assert_close(out, reference.attention(q, k, v), rtol=2e-2, atol=2e-2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def peak_bytes(heads_q, heads_kv, tokens, dim):
    """Peak of forward and backward beyond the inputs, and the bytes of what they must hold by then."""
    q, k, v = (
        torch.randn(1, tokens, h, dim, device="cuda", dtype=BF16).transpose(1, 2).requires_grad_()
        for h in (heads_q, heads_kv, heads_kv)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attention(q, k, v, backend="triton")
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    peak = torch.cuda.max_memory_allocated() - before
    assert all(g.isfinite().all() for g in grads)
    tensors = q.element_size() * (3 * q.numel() + 2 * k.numel())  # out, its gradient, dq; dk, dv
    rows = 4 * 3 * heads_q * (tokens + 128)  # lse, lse in powers of two, delta
    return peak, tensors + rows


def test_memory_is_inputs_outputs_gradients_and_rows():
    for heads_q, heads_kv in ((32, 32), (32, 8), (32, 1)):
        for tokens in (4096, 32_768, 65_536):
            peak, needed = peak_bytes(heads_q, heads_kv, tokens, 64)
            programs = heads_kv * math.ceil(tokens / 128)
            if programs < tiles.programs_to_fill(torch.device("cuda", 0)):
                # A small launch cuts its groups: at most twice as many programs as fill the chip, of 128 fp32 rows
                # of dk and of dv; and one of the two is summed at a time.
                needed += (2 + 1) * 2 * tiles.programs_to_fill(torch.device("cuda", 0)) * 128 * 64 * 4
            assert peak <= needed * 1.02 + 2**21, (heads_q, heads_kv, tokens, peak, needed)


def test_131072_tokens_on_one_gpu():
    peak, needed = peak_bytes(32, 8, 131_072, 128)
    assert peak <= needed * 1.02 + 2**21


@pytest.mark.parametrize("mask", ["causal", "window+documents"])
def test_compiles_whole_with_inductor(mask):
    case = Case((8, 2), (256, 256), 64, BF16, mask, batch=2)
    (q, k, v), dout, options = inputs(case, "cuda")

    def layer(q, k, v):
        return flash_attention(q.sin(), k.cos(), v * 2, **options) + 1

    out = layer(q, k, v)
    wanted = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    out = torch.compile(layer, fullgraph=True)(q, k, v)
    for got, right in zip([out, *torch.autograd.grad(out, (q, k, v), dout)], wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2)


def test_new_lengths_do_not_compile_anew():
    """Only constants are compiled in: another T, batch or number of heads reuses the kernel."""
    from kernels.flash_attention_forward import forward_kernel

    def run_length(tokens, batch=1, heads=4):
        q = torch.randn(batch, tokens, heads, 64, device="cuda", dtype=BF16).transpose(1, 2)
        flash_attention(q, q, q, backend="triton")

    run_length(100)
    before = len(forward_kernel.device_caches[0][0])
    for arguments in ((101,), (112,), (1024,), (64, 3), (64, 2, 8)):
        run_length(*arguments)
    assert len(forward_kernel.device_caches[0][0]) == before


def test_under_checkpointing_and_autocast():
    (q, k, v), dout, options = inputs(Case((8, 2), (256, 256), 64, BF16, batch=2), "cuda")
    wanted = run(q, k, v, dout, options)
    with torch.autocast("cuda", dtype=BF16):
        out = checkpoint(lambda *x: flash_attention(*x, backend="triton", **options), q, k, v, use_reentrant=False)
        got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    assert all(map(torch.equal, got, wanted))


def test_in_a_cuda_graph():
    (q, k, v), dout, options = inputs(Case((8, 2), (256, 256), 64, BF16, batch=2), "cuda")
    wanted = run(q, k, v, dout, options)[0]
    q, k, v = (x.detach() for x in (q, k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, backend="triton", **options)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_torch_backend_compiles_whole():
    (q, k, v), dout, options = inputs(Case((8, 2), (256, 256), 64, BF16, batch=2), "cuda")
    layer = torch.compile(lambda *x: flash_attention(*x, backend="torch", **options), fullgraph=True)
    expected = reference.attention(*(x.float() for x in (q, k, v)), **options)
    torch.testing.assert_close(layer(q, k, v).float(), expected, rtol=2e-2, atol=2e-2)


def test_torch_backend_is_fused_and_right():
    """SDPA with grouped heads, a mask, or fp32: no kernel that stores T x T, no copy of K for each query head."""
    for dtype, mask in ((BF16, "causal"), (BF16, "full"), (BF16, "window"), (BF16, "documents"), (FP32, "causal")):
        (q, k, v), dout, options = inputs(Case((8, 2), (300, 300), 64, dtype, mask, batch=2), "cuda")
        out = flash_attention(q, k, v, backend="torch", **options)
        got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        out = reference.attention(*(x.float() for x in (q, k, v)), **options)
        expected = [out, *torch.autograd.grad(out, (q, k, v), dout.float())]
        for x, y in zip(got, expected, strict=True):
            assert (x - y).abs().max() <= (2e-2 if dtype == BF16 else 1e-4) * y.abs().max()


def test_a_training_step_runs_our_kernels_and_no_other():
    """Profiler trace of one step of a small attention layer: the three kernels and no other attention kernel."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 512 + 2 * 128, device="cuda", dtype=BF16)
    x = torch.randn(2, 1024, 512, device="cuda", dtype=BF16)

    def step():
        q, k, v = layer(x).split([512, 128, 128], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, 64)).transpose(1, 2) for y in (q, k, v))
        flash_attention(q, k, v).transpose(1, 2).flatten(2).square().mean().backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    names = [event.key for event in trace.key_averages()]
    for kernel in ("forward_kernel", "prepare_kernel", "dkdv_kernel", "dq_kernel"):
        assert any(name.startswith(kernel) for name in names), (kernel, names)
    foreign = [n for n in names if any(w in n.lower() for w in ("flash_fwd", "flash_bwd", "fmha", "softmax", "sdpa"))]
    assert not foreign, foreign


def test_the_table_of_this_chip():
    shared_memory, l2, processors = tiles.device_limits(0)
    print(f"{torch.cuda.get_device_name()}: {shared_memory} B shared, {l2 >> 20} MB L2, {processors} SMs: "
          f"{tiles.family(shared_memory)}")  # fmt: skip
    if torch.cuda.get_device_capability()[0] == 9:
        assert tiles.family(shared_memory) == "hopper"
