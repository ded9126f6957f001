"""decode_linear on silicon: bf16, bits that do not depend on the rows beside, CUDA graphs."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import quantized_linear, ring_linear  # noqa: E402
from kernels.decode_linear import TABLE, decode_linear, launch, tiling_for, unpacked  # noqa: E402
from kernels.quantize import dequantize, quantize  # noqa: E402
from tests.test_decode_linear import FORMATS, problem  # noqa: E402
from tests.test_ring_linear import expected  # noqa: E402

pytestmark = pytest.mark.gpu

FUSIONS = ("norm", "residual", "all")
SIZES = [(768, 768), (272, 2112), (4096, 1024), (6144, 576), (16384, 576)]  # of each class, and ragged ones
MATRICES = {  # of a layer, and the head
    "124M": [(1280, 768), (768, 768), (4096, 768), (768, 2048), (50304, 768)],
    "135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "306M": [(1536, 1024), (1024, 1024), (6144, 1024), (1024, 3072), (8192, 1024)],
    "1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],
    "large": [(6144, 4096), (28672, 4096)],
}
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-5}  # of the largest result


def on_gpu(M, N, K, bits, fusion, dtype, group=64):
    x, weight, options = problem(M, N, K, None, fusion, dtype)
    weight = quantize(weight.values.cuda(), bits, group)
    return x.cuda(), weight, {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bits", FORMATS)
def test_against_the_definition_and_bits_by_rows(bits, size):
    """Right in bf16, and a row has the same bits alone, in tiles of 8 and in tiles of 16."""
    for fusion in FUSIONS:
        x, weight, options = on_gpu(33, *size, bits, fusion, torch.bfloat16)
        everything = decode_linear(x, weight, **options, out_dtype=torch.float32)
        on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        want = decode_linear(x.cpu(), weight.to("cpu"), **on_cpu, out_dtype=torch.float32)
        assert ((everything.cpu() - want).abs().max() / want.abs().max()).item() < 2e-4
        for M in (1, 2, 5, 8, 9, 16, 17):
            for rows in (slice(0, M), slice(33 - M, 33)):
                part = options if options["residual"] is None else options | {"residual": options["residual"][rows]}
                assert torch.equal(decode_linear(x[rows], weight, **part, out_dtype=torch.float32), everything[rows])


@pytest.mark.parametrize("size", [size for sizes in MATRICES.values() for size in sizes], ids=str)
def test_matrices_of_models(size):
    """In bf16, whichever kernel takes them: right, and with the same bits for any number of rows and any place."""
    x, weight, options = on_gpu(33, *size, None, "all", torch.bfloat16)
    is_ring = isinstance(tiling_for(weight, options["norm"]), ring_linear.Tiling)
    assert is_ring == (min(size) < ring_linear.NARROW)
    everything = decode_linear(x, weight, **options, out_dtype=torch.float32)
    want = expected(x, weight, options)
    assert ((everything - want).abs().max() / want.abs().max()).item() < 2e-4
    for M in range(1, 33):
        for rows in (slice(0, M), slice(33 - M, 33)):
            part = options | {"residual": options["residual"][rows]}
            assert torch.equal(decode_linear(x[rows], weight, **part, out_dtype=torch.float32), everything[rows])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_bits_are_slices_and_chunks_alone(dtype):
    """Of the kernel for small models: however much of W and of x is ahead, and from wherever rows begin."""
    x, weight, options = on_gpu(16, 1040, 2048, None, "all", dtype)

    def run(x, tiling, M):
        part = options | {"residual": options["residual"][:M]}
        out = torch.full_like(part["residual"], float("nan"), dtype=torch.float32)
        return launch(x[:M], weight, **part, out=out, tiling=tiling)

    tilings = [ring_linear.Tiling(p, 8, 1, a, b) for p, a, b in ((1, None, 0), (2, 3, 0), (4, 1, 2), (1, 8, 1))]
    everything = run(x, tilings[0], 16)
    want = expected(x, weight, options)
    assert ((everything - want).abs().max() / want.abs().max()).item() < 2e-4
    wide = torch.full((16, 2049 + 8), float("nan"), device="cuda", dtype=dtype)
    wide[:, 1:2049] = x
    for tiling in tilings:
        for M in (1, 8, 9, 16):
            assert torch.equal(run(x, tiling, M), everything[:M])
            assert torch.equal(run(wide[:, 1:2049], tiling, M), everything[:M])


@pytest.mark.parametrize("size", ((272, 2112), (16384, 576)), ids=str)
def test_the_pipeline_with_small_matrices(size):
    """What small matrices that do not begin at 16 bytes take."""
    x, weight, options = on_gpu(17, *size, None, "all", torch.bfloat16)
    place = torch.empty(weight.values.numel() + 1, device="cuda", dtype=torch.bfloat16)
    moved = quantize(place[1:].view(size).copy_(weight.values), None)
    assert tiling_for(moved) in TABLE
    got = decode_linear(x, moved, **options, out_dtype=torch.float32)
    want = expected(x, weight, options)
    assert ((got - want).abs().max() / want.abs().max()).item() < 2e-4
    for M in (1, 8, 9):
        part = options | {"residual": options["residual"][:M]}
        assert torch.equal(decode_linear(x[:M], moved, **part, out_dtype=torch.float32), got[:M])


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("bits", FORMATS)
def test_other_dtypes(bits, dtype):
    x, weight, options = on_gpu(17, 256, 512, bits, "all", dtype)
    got = decode_linear(x, weight, **options)
    on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    want = decode_linear(x.cpu(), weight.to("cpu"), **on_cpu, out_dtype=torch.float32)
    assert got.dtype == dtype
    assert ((got.cpu().float() - want).abs().max() / want.abs().max()).item() < TOLERANCE[dtype]
    fewer = options | {"residual": options["residual"][:3]}
    assert torch.equal(decode_linear(x[:3], weight, **fewer), got[:3])


@pytest.mark.parametrize("group", (32, 128))
def test_groups(group):
    x, weight, options = on_gpu(5, 512, 1024, "int4", "norm", torch.bfloat16, group)
    want = decode_linear(x.cpu(), weight.to("cpu"), norm=options["norm"].cpu(), eps=1e-3, out_dtype=torch.float32)
    got = decode_linear(x, weight, **options, out_dtype=torch.float32).cpu()
    assert ((got - want).abs().max() / want.abs().max()).item() < 2e-4


def test_quantising_is_the_same_as_on_the_cpu():
    matrix = torch.randn(300, 512).bfloat16()
    for bits in ("int8", "int4"):
        here, there = quantize(matrix, bits), quantize(matrix.cuda(), bits)
        same = (here.values.view(torch.uint8) == there.values.cpu().view(torch.uint8)).float().mean()
        assert same > 0.999 and torch.allclose(dequantize(here), dequantize(there).cpu(), atol=0.1)


@pytest.mark.parametrize("bits", ("int8", "int4"))
def test_bits_are_the_slices_alone(bits):
    """However many panels a program has, and however far ahead it reads."""
    x, weight, options = on_gpu(16, 1040, 2048, bits, "all", torch.bfloat16)

    def run(M, tiling):
        part = options | {"residual": options["residual"][:M]}
        out = torch.full_like(part["residual"], float("nan"), dtype=torch.float32)
        return launch(x[:M], weight, **part, out=out, tiling=tiling)

    everything = run(16, quantized_linear.Tiling(1, 4, 1))
    for panels, ahead, unroll in ((1, 8, 4), (2, 3, 3), (4, 2, 1)):
        for M in (1, 8, 16):
            assert torch.equal(run(M, quantized_linear.Tiling(panels, 4, ahead, unroll)), everything[:M])


def test_every_stored_number_is_unpacked():
    """All values of 8 and of 4 bits, subnormals of bf16 on the way, in every lane: the rows of an identity bring each
    weight out of the product alone."""
    for bits, group in (("int8", 64), ("int4", 32), ("int4", 64), ("int4", 128)):
        low, high = (-127, 127) if bits == "int8" else (-8, 7)
        matrix = torch.randint(low, high + 1, (256, 256), device="cuda").float()
        matrix[:, :: 256 if bits == "int8" else group] = low
        weight = quantize(matrix, bits, group)
        assert torch.equal(dequantize(weight), matrix)
        identity = torch.eye(256, device="cuda", dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.equal(decode_linear(identity.to(dtype), weight).float(), matrix.t())
            assert torch.equal(unpacked(weight, dtype).float(), matrix)


@pytest.mark.parametrize("shape", ((65, 96), (4096, 2048)), ids=str)
def test_unpacking_many(shape):
    matrix = torch.randn(shape, device="cuda")
    for bits in ("int8", "int4"):
        weight = quantize(matrix, bits, 32)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.equal(unpacked(weight, dtype), dequantize(weight, dtype=dtype))


def test_a_matrix_past_2_to_the_31_elements():
    weight = torch.zeros(128256 * 9, 2048, device="cuda", dtype=torch.bfloat16)
    weight[-1] = 1.0
    y = decode_linear(torch.ones(1, 2048, device="cuda", dtype=torch.bfloat16), weight)
    assert y[0, -1] == 2048 and y[0, :-1].abs().max() == 0


@pytest.mark.parametrize("bits, pipeline", ((None, False), (None, True), ("int8", False), ("int4", False)))
def test_a_chain_in_a_graph(bits, pipeline):
    """Each launch reads what the one before wrote, in place; the graph gives the bits of eager launches."""
    x = torch.randn(3, 1024, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    weights = [quantize(torch.randn(1024, 1024, device="cuda").bfloat16() / 32, bits) for _ in range(8)]

    def chain(y):
        for weight in weights:
            y = launch(y, weight, norm, 1e-5, None, y, False, torch.empty_like(y), TABLE[0] if pipeline else None)
        return y

    want = chain(x).clone()
    source = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(source)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("bits", FORMATS)
def test_every_entry_of_the_table_fits_this_gpu(bits):
    sizes = ((1024, 1024), (4096, 1024), (2048, 2048), (1024, 3072), (3072, 2048), (16384, 1024), (16384, 2048))
    for size in (*sizes, (4096, 4096), (16384, 4096)):  # of each class of each table
        weight = quantize(torch.randn(*size, device="cuda", dtype=torch.bfloat16), bits)
        for M in (1, 16):
            x = torch.randn(M, size[1], device="cuda", dtype=torch.bfloat16)
            assert decode_linear(x, weight, norm=x[0]).isfinite().all()
