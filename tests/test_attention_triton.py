"""The Triton kernels against the definition, run by Triton's interpreter where there is no GPU.

The interpreter shows wrong algebra, masks and bounds. What it cannot show (races, bf16, speed) is tested in tests/gpu
and, by reading what the compiler made, in test_kernel_lint.py.
"""

import dataclasses
import importlib
import math
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.attention_cases import DEVICE, HEADS, LAYOUTS, MASKS, Case, check, inputs, run  # isort: skip

from kernels import choose_backend, describe_backend, flash_attention, reference, tiles

dispatch = importlib.import_module("kernels.flash_attention")  # the module: the package's name is the function
backward_module = importlib.import_module("kernels.flash_attention_backward")

# Around the tiles of the interpreter (64 x 32 and 32 x 64), below them, ragged, and far from square.
LENGTHS = [
    (1, 1), (3, 3), (1, 239), (239, 1), (3, 130), (130, 3), (64, 32), (64, 128), (113, 203), (113, 128), (128, 217),
    (113, 211), (108, 256), (65, 64), (31, 33), (192, 96),
]  # fmt: skip
DIMS = [16, 32, 40, 64, 80]


def matrix():
    """Every pair of lengths with every mask; heads, head_dim, dtype, layout and batch take turns."""
    for i, tokens in enumerate(LENGTHS):
        for j, mask in enumerate(MASKS):
            n = i * len(MASKS) + j
            yield Case(
                heads=[(2, 2), (2, 1), (4, 2), (3, 1)][n % 4],
                tokens=tokens,
                head_dim=DIMS[(n + i) % len(DIMS)],
                dtype=[torch.float32, torch.float16][(n + n // 5) % 2],
                mask=mask,
                layout=LAYOUTS[(n + n // 5) % len(LAYOUTS)],
                batch=1 + (n % 7 == 0),
            )


@pytest.fixture(autouse=True)
def arithmetic_warnings_are_errors():
    """inf - inf and 0 / 0 warn in the interpreter before they turn up as NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("case", list(matrix()), ids=str)
def test_matrix(case):
    check(case)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_ratios(heads):
    check(Case(heads=heads, tokens=(70, 70), head_dim=16))


@pytest.mark.parametrize("head_dim", [20, 96, 128, 192, 256])
def test_other_head_dims(head_dim):
    for dtype in (torch.float32, torch.float16):
        check(Case(tokens=(40, 72), head_dim=head_dim, dtype=dtype))


def test_buffers_really_are_dirty():
    """The premise of `run`: what the op allocates starts as NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all() and torch.ones(2).new_empty(2, 3).transpose(0, 1).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(layout):
    case = Case(heads=(4, 2), tokens=(70, 70), head_dim=32, batch=2)
    expected = run(*(lambda leaves, dout, options: (*leaves, dout, options))(*inputs(case)))
    (q, k, v), dout, options = inputs(dataclasses.replace(case, layout=layout))
    for got, wanted in zip(run(q, k, v, dout, options), expected, strict=True):
        assert torch.equal(got, wanted)


def test_upstream_gradients_of_any_layout():
    (q, k, v), dout, options = inputs(Case(heads=(4, 2), tokens=(40, 40)))
    one = torch.ones((), device=DEVICE)
    for strange in (
        one.expand_as(dout),  # what out.sum() sends back
        dout[:, :, :1].expand_as(dout),
        dout.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([dout, dout], dim=1)[:, ::2],
    ):
        got = run(q, k, v, strange, options)
        wanted = run(q, k, v, strange.contiguous(), options)
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("mask", MASKS)
def test_tiles_loaded_by_descriptor(mask, monkeypatch):
    """The same bits whether tiles come by pointers or, as on Hopper, by TMA descriptors."""
    case = Case(heads=(4, 2), tokens=(70, 100), head_dim=24, mask=mask, batch=2)
    (q, k, v), dout, options = inputs(case)
    by_pointer = run(q, k, v, dout, options)
    tma = {phase: dataclasses.replace(tile, tma=True) for phase, tile in tiles.INTERPRETER.items()}
    monkeypatch.setattr(tiles, "INTERPRETER", tma)
    used = []
    descriptor = backward_module.TensorDescriptor
    monkeypatch.setattr(backward_module, "TensorDescriptor", lambda *a: used.append(a) or descriptor(*a))
    by_descriptor = run(q, k, v, dout, options)
    assert len(used) == 2  # lse and delta of the dk, dv kernel: the descriptor path did run
    assert all(map(torch.equal, by_descriptor, by_pointer))


def test_rows_that_see_nothing_are_zero():
    (q, k, v), dout, _ = inputs(Case(heads=(2, 1), tokens=(70, 40)))
    out, dq, _, _ = run(q, k, v, dout, dict(causal=True))
    assert torch.equal(out[:, :, :30], torch.zeros_like(out[:, :, :30]))
    assert torch.equal(dq[:, :, :30], torch.zeros_like(dq[:, :, :30]))
    out, lse = flash_attention(q, k, v, return_lse=True, backend="triton")
    assert lse[:, :, :30].isneginf().all() and lse[:, :, 30:].isfinite().all()
    none = k.detach()[:, :, :0].requires_grad_()
    for grad in run(q, none, none.detach().requires_grad_(), dout, dict(causal=True)):
        assert torch.equal(grad, torch.zeros_like(grad))
    empty = run(q[:, :, :0].detach().requires_grad_(), k, v, dout[:, :, :0], dict(causal=True))
    assert empty[0].shape == (1, 2, 0, 32) and torch.equal(empty[2], torch.zeros_like(k))


def test_lse_is_the_definitions_and_carries_no_gradient():
    for mask in MASKS:
        (q, k, v), _, options = inputs(Case(heads=(4, 2), tokens=(70, 50), mask=mask))
        out, lse = flash_attention(q, k, v, return_lse=True, backend="triton", **options)
        _, expected = reference.attention(q, k, v, return_lse=True, **options)
        torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)
        assert out.requires_grad and not lse.requires_grad and lse.dtype == torch.float32


def test_large_logits():
    """Scores in the hundreds: the maximum is subtracted before exp2, and a hidden score may exceed lse by far."""
    warnings.filterwarnings("ignore", "overflow encountered in exp2")  # of hidden scores, erased right after
    for dtype in (torch.float32, torch.float16):
        (q, k, v), dout, options = inputs(Case(tokens=(70, 70), dtype=dtype))
        q, k = ((x.detach() * 20).requires_grad_() for x in (q, k))
        out = reference.attention(*(x.double() for x in (q, k, v)), **options)
        expected = [out, *torch.autograd.grad(out, (q, k, v), dout.double())]
        for got, wanted in zip(run(q, k, v, dout, options), expected, strict=True):
            assert got.isfinite().all()
            assert (got - wanted).abs().max() <= (1e-3 if dtype == torch.float32 else 3e-2) * wanted.abs().max()


def test_scale():
    (q, k, v), dout, _ = inputs(Case(tokens=(40, 40)))
    doubled = run((q * 2).detach().requires_grad_(), k, v, dout, dict(scale=0.5))
    for got, wanted, factor in zip(run(q, k, v, dout, dict(scale=1.0)), doubled, (1, 2, 1, 1), strict=True):
        torch.testing.assert_close(got, wanted * factor, rtol=1e-5, atol=1e-5)


def test_packed_documents_equal_separate_ones():
    lengths = [1, 40, 7, 64, 18]
    (q, k, v), dout, _ = inputs(Case(heads=(4, 2), tokens=(130, 130)))
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    doc_start = starts.repeat_interleave(torch.tensor(lengths))[None].to(DEVICE, torch.int32)
    packed = run(q, k, v, dout, dict(doc_start=doc_start))
    pieces = [x.detach().split(lengths, dim=2) for x in (q, k, v)]
    separate = [
        run(*(p[i].requires_grad_() for p in pieces), dout.split(lengths, dim=2)[i], {}) for i in range(len(lengths))
    ]
    for name, got, parts in zip(("out", "dq", "dk", "dv"), packed, zip(*separate, strict=True), strict=True):
        torch.testing.assert_close(
            got, torch.cat(parts, dim=2), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_window_of_everything_and_of_one():
    (q, k, v), dout, _ = inputs(Case(tokens=(70, 70)))
    assert all(map(torch.equal, run(q, k, v, dout, dict(window=70)), run(q, k, v, dout, {})))
    out, dq, dk, dv = run(q, k, v, dout, dict(window=1))
    torch.testing.assert_close(out, v.expand_as(out))
    torch.testing.assert_close(dq, torch.zeros_like(dq), rtol=0, atol=1e-6)
    torch.testing.assert_close(dv, dout.sum(dim=1, keepdim=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(6, 1), (8, 2)], ids=str)
def test_cutting_the_group_changes_only_rounding(heads, monkeypatch):
    (q, k, v), dout, options = inputs(Case(heads=heads, tokens=(70, 70)))
    results = []
    for programs in (1, 10, 10**6):
        monkeypatch.setattr(backward_module, "programs_to_fill", lambda device, n=programs: n)
        results.append(run(q, k, v, dout, options))
        assert all(map(torch.equal, results[-1], run(q, k, v, dout, options)))
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_operators_keep_their_promises_to_pytorch():
    """Schema, fake implementation and autograd registration, by PyTorch's own checker."""
    (q, k, v), dout, _ = inputs(Case(heads=(4, 2), tokens=(20, 30)))
    doc_start = torch.zeros(1, 20, dtype=torch.int32, device=DEVICE)
    for arguments in ((None, False, None, 0.2), (None, True, 5, 0.2), (doc_start, True, None, 0.2)):
        torch.library.opcheck(dispatch.forward_op, (q, k, v, *arguments))
    with torch.no_grad():
        out, lse = dispatch.forward_op(q, k, v, None, True, None, 0.2)
    saved = [x.detach() for x in (dout, q, k, v, out, lse)]
    torch.library.opcheck(dispatch.backward_op, (*saved, None, True, None, 0.2))


@pytest.mark.parametrize("mask", ["causal", "window+documents"])
def test_compiles_whole(mask):
    (q, k, v), dout, options = inputs(Case(heads=(4, 2), tokens=(20, 20), mask=mask))
    wanted = run(q, k, v, dout, options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, k, v):
        return flash_attention(q, k, v, backend="triton", **options) * 2.0

    out = layer(q, k, v)
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y * 2.0)


def test_under_activation_checkpointing():
    (q, k, v), dout, options = inputs(Case(heads=(4, 2), tokens=(40, 40)))
    out = checkpoint(lambda *x: flash_attention(*x, backend="triton", **options), q, k, v, use_reentrant=False)
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    assert all(map(torch.equal, got, run(q, k, v, dout, options)))


def test_gradient_for_some_inputs_only():
    (q, k, v), dout, options = inputs(Case(heads=(2, 1), tokens=(40, 40)))
    _, _, dk, _ = run(q, k, v, dout, options)
    out = flash_attention(q.detach(), k, v.detach(), backend="triton", **options)
    (got,) = torch.autograd.grad(out, (k,), dout)
    assert torch.equal(got, dk)


def test_trial_agrees_with_the_definition():
    for head_dim, dtype in ((64, torch.float32), (80, torch.float16)):
        errors = dispatch.trial(torch.device(DEVICE), head_dim, dtype)
        assert max(errors) <= dispatch.TRIAL_TOLERANCE[dtype]


def test_trial_notices_a_wrong_kernel(monkeypatch):
    forward = dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda q, *rest: forward(q * 1.1, *rest))
    assert max(dispatch.trial(torch.device(DEVICE), 32, torch.float32)) > 10 * dispatch.TRIAL_TOLERANCE[torch.float32]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A machine with a GPU, as far as the choice of a backend can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dispatch._choose.cache_clear()
    yield monkeypatch
    dispatch._choose.cache_clear()


def test_choice_on_cpu_is_torch():
    assert choose_backend("cpu") == "torch"
    assert describe_backend("cpu") == "attention on cpu: torch, because Triton kernels need a GPU and this is cpu"


def test_choice_by_trial(pretended_gpu):
    calls = []
    pretended_gpu.setattr(dispatch, "trial", lambda *a: calls.append(a) or [1e-3, 1e-3, 2e-3, 1e-3])
    assert choose_backend("cuda", 0) == "triton"
    assert describe_backend("cuda:0") == (
        "attention on cuda:0: triton, because its trial on Pretended GPU agrees with the definition "
        "(out, dq, dk, dv within 1.0e-03, 1.0e-03, 2.0e-03, 1.0e-03)"
    )
    assert len(calls) == 1  # once for a device, head_dim and dtype


def test_fallback_is_announced(pretended_gpu):
    def no_compiler(*arguments):
        raise RuntimeError("Failed to find C compiler")

    failures = [
        (lambda *a: [1e-3, 0.5, 1e-3, 1e-3], "is wrong: out, dq, dk, dv differ"),
        (lambda *a: [math.nan] * 4, "is wrong: out, dq, dk, dv differ"),
        (no_compiler, "failed their trial launch .RuntimeError: Failed to find C compiler"),
    ]
    for trial, message in failures:
        dispatch._choose.cache_clear()
        pretended_gpu.setattr(dispatch, "trial", trial)
        with pytest.warns(UserWarning, match=f"falls back to PyTorch's own attention on cuda:0: .*{message}"):
            assert choose_backend("cuda", 0) == "torch"
    with pytest.warns(UserWarning, match="head_dim 8 is outside 16 .. 256"):
        assert choose_backend("cuda", 0, 8) == "torch"
    pretended_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.warns(UserWarning, match="compute capability 7.5 is below 8.0"):
        assert choose_backend("cuda", 0, 128) == "torch"


def test_a_wrong_trial_is_not_hidden(pretended_gpu):
    """Only launch failures lead to the fallback; a mistake in the trial itself surfaces."""

    def mistake(*arguments):
        raise TypeError("a mistake")

    pretended_gpu.setattr(dispatch, "trial", mistake)
    with pytest.raises(TypeError, match="a mistake"):
        choose_backend("cuda", 0)


def test_refusals_of_the_triton_backend():
    q = torch.randn(1, 2, 8, 8, device=DEVICE)
    for x, message in ((q, "head_dim 8 is outside 16 .. 256"), (torch.randn(1, 2, 8, 16).double(), "float64 is not")):
        x = x.to(DEVICE)
        with pytest.raises(ValueError, match=f'backend "triton" cannot run here: .*{message}'):
            flash_attention(x, x, x, backend="triton")


def test_table_covers_every_chip_and_head_dim():
    for shared_memory in (101_376, 166_912, 232_448):
        for phase in tiles.PHASES:
            for head_dim in range(tiles.MIN_HEAD_DIM, tiles.MAX_HEAD_DIM + 1):
                for element_size in (2, 4):
                    tile = tiles.tile_for_chip(phase, head_dim, element_size, shared_memory)
                    assert backward_module.PADDING % tile.rows == 0
    assert [tiles.family(s) for s in (101_376, 166_912, 232_448)] == ["small", "ampere", "hopper"]
