"""The kernel for 16-bit weights that loads straight into registers: in the interpreter, in fp16, against fp64."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import ring_linear  # noqa: E402
from kernels.ring_linear import LARGEST, NARROW, TABLE, Tiling, class_of, fits, launch  # noqa: E402
from tests.test_decode_linear import FUSIONS, definition, problem  # noqa: E402

# All of K before the wait; a queue with x two steps ahead; one with x loaded where it is used.
TILINGS = (Tiling(1, 4, 1), Tiling(2, 2, 2, ahead=2, x_ahead=2), Tiling(4, 2, 1, ahead=3))
SIZES = ((1, 48, 160), (5, 16, 64), (17, 80, 512))  # rows of x, N, K: below, at and past a step, ragged and not
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def run(x, weight, options, tiling):
    """In fp32, so that what the kernel rounds is only x * norm."""
    width = weight.shape[0] // (2 if options["swiglu"] else 1)
    out = torch.full((len(x), width), float("nan"))
    assert launch(x, weight.values, out=out, tiling=tiling, **options) is out
    return out


def expected(x, weight, options):
    """fp64, with x * norm rounded as the kernel says."""
    if options["norm"] is None:
        return definition(x, weight, **options)
    rounded = x * options["norm"]
    mean = x.double().square().mean(1, keepdim=True)
    x = rounded.double() * torch.rsqrt(mean + options["eps"])
    return definition(x, weight, **options | {"norm": None})


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_against_fp64(tiling, fusion):
    for M, N, K in SIZES:
        x, weight, options = problem(M, N, K, None, fusion, torch.float16)
        torch.testing.assert_close(
            run(x, weight, options, tiling).double(), expected(x, weight, options), **TOLERANCE
        )  # fmt: skip


@pytest.mark.parametrize("tiling", dict.fromkeys(tiling for *_, tiling in TABLE), ids=str)
def test_shipped_tilings(tiling):
    step = tiling.slices * tiling.chunks * ring_linear.COLUMNS
    for K in (step, 5 * step + 16):
        x, weight, options = problem(2, 48, K, None, "norm", torch.float16)
        torch.testing.assert_close(
            run(x, weight, options, tiling).double(), expected(x, weight, options), **TOLERANCE
        )  # fmt: skip


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_rows_do_not_depend_on_their_number(tiling):
    """Bit for bit, and whatever else the tile holds. NumPy's products add in another order for another size, and for
    another row, so here rows keep their places, in tiles of 8 and in tiles of 16. A GPU's do not (tests/gpu)."""
    x, weight, options = problem(33, 48, 160, None, "all", torch.float16)
    for most, fewer in ((8, (1, 2, 5)), (33, (9, 16, 17))):

        def first(M, x=x):
            return run(x[:M], weight, options | {"residual": options["residual"][:M]}, tiling)

        everything = first(most)
        for M in fewer:
            assert torch.equal(first(M), everything[:M])
        disturbed = x.clone()
        disturbed[1] = float("nan")
        got = first(most, disturbed)
        assert got[1].isnan().all()
        assert torch.equal(got[2:], everything[2:]) and torch.equal(got[0], everything[0])


def test_bits_are_slices_and_chunks_alone():
    x, weight, options = problem(3, 48, 416, None, "norm", torch.float16)
    first = run(x, weight, options, Tiling(1, 2, 2, ahead=1))
    for ahead, x_ahead in ((None, 0), (2, 0), (3, 1), (9, 4)):
        assert torch.equal(run(x, weight, options, Tiling(1, 2, 2, ahead, x_ahead)), first)
    assert not torch.equal(run(x, weight, options, Tiling(1, 4, 1, 1)), first)


def test_rows_that_begin_anywhere():
    """Strided, and where no load of 16 bytes can begin; results into a wider buffer, and in place of the residual."""
    x, weight, options = problem(3, 48, 96, None, "residual", torch.float16)
    want = run(x, weight, options, TILINGS[0])
    for start, width in ((0, 96), (8, 104), (8, 96), (1, 104), (16, 121)):
        wide = torch.full((3, width + start), float("nan"), dtype=torch.float16)
        wide[:, start : start + 96] = x
        assert torch.equal(run(wide[:, start : start + 96], weight, options, TILINGS[0]), want)
    out = torch.full((3, 64), float("nan"), dtype=torch.float16)
    out[:, 8:56] = options["residual"]
    launch(x, weight.values, None, 1e-5, None, out[:, 8:56], False, out[:, 8:56], TILINGS[0])
    assert torch.equal(out[:, 8:56], want.half())
    assert out[:, :8].isnan().all() and out[:, 56:].isnan().all()


def test_which_matrices():
    """By the matrix and the norm, never by x."""
    for (N, K), index in {
        (768, 768): 0, (1536, 1024): 0, (4096, 768): 1, (50304, 768): 1, (768, 2048): 2, (576, 1536): 2,
        (2048, 2048): 2, (1024, 3072): 3, (2048, 8192): 3, (3072, 2048): 4, (16384, 2048): 5,
    }.items():  # fmt: skip
        assert class_of(N, K) == index
    assert class_of(2**22, 16) == 1 and class_of(16, 2**22) == 3

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    assert fits(empty(64, 96), None) and fits(empty(64, 96), empty(96))
    assert fits(empty(LARGEST // 2048, 2048, dtype=torch.float16), None)
    assert not fits(empty(LARGEST // 2048 + 16, 2048), None)
    assert fits(empty(NARROW - 16, 8192), None) and not fits(empty(NARROW, NARROW), None)
    assert not fits(empty(64, 96, dtype=torch.float32), None)
    assert not fits(empty(64, 96), empty(96, dtype=torch.float32))
    assert not fits(empty(64, 100)[:, :96], None)
    assert fits(empty(64, 128)[:, :96], None)
    place = torch.empty(64 * 104, dtype=torch.bfloat16)
    assert fits(place[:6144].view(64, 96), None) and not fits(place[4:6148].view(64, 96), None)
    assert not fits(place[:6144].view(64, 96), place[1:97])
