"""decode_linear: the kernel in the interpreter against fp64, its plain-torch twin, and quantised weights."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels import reference
from kernels.decode_linear import CLASSES, FP32, TABLE, Tiling, decode_linear, launch, tiling_for
from kernels.quantize import GROUPS, PANEL, Weight, dequantize, pack_gate_up, quantize

triton = pytest.importorskip("triton")

from kernels import quantized_linear, ring_linear, unpack  # noqa: E402

FORMATS = (None, "int8", "int4")
FUSIONS = ("plain", "norm", "bias", "residual", "swiglu", "all")
SMALL = {
    None: Tiling(16, 32, 2, 4, 1),
    "int8": quantized_linear.Tiling(2, 4, 1),
    "int4": quantized_linear.Tiling(2, 2, 2, unroll=2),
}


def problem(M, N, K, bits, fusion, dtype=torch.float32, seed=0, group=32):
    """x, Weight and the options of one fusion."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    swiglu = fusion in ("swiglu", "all")
    weight = draw(N, K, scale=K**-0.5)
    if swiglu:
        weight = pack_gate_up(weight[: N // 2], weight[N // 2 :])
    options = dict(norm=None, eps=1e-3, bias=None, residual=None, swiglu=swiglu)
    if fusion in ("norm", "all"):
        options["norm"] = 1 + 0.2 * draw(K)
    if fusion in ("bias", "all"):
        options["bias"] = draw(N)
    if fusion in ("residual", "all"):
        options["residual"] = draw(M, N // 2 if swiglu else N)
    return draw(M, K, scale=2.0), quantize(weight, bits, group), options


def definition(x, weight, norm, eps, bias, residual, swiglu):
    """fp64, written the way a model writes it."""
    x, matrix = x.double(), dequantize(weight).double()
    if norm is not None:
        x = F.rms_norm(x, x.shape[1:], norm.double(), eps)
    y = x @ matrix.t()
    if bias is not None:
        y = y + bias.double()
    if swiglu:
        gate, up = y.view(len(y), -1, 2).unbind(-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


def in_interpreter(x, weight, options, tiling=None):
    width = weight.shape[0] // (2 if options["swiglu"] else 1)
    return launch(x, weight, out=x.new_full((len(x), width), float("nan")), tiling=tiling, **options)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("bits", FORMATS)
def test_kernel_against_fp64(bits, fusion):
    # N no multiple of the tile's rows, K no multiple of its step.
    for M, N, K in ((1, 48, 160), (5, 16, 64), (17, 80, 96)):
        x, weight, options = problem(M, N, K, bits, fusion)
        got = in_interpreter(x, weight, options, SMALL[bits])
        torch.testing.assert_close(got.double(), definition(x, weight, **options), rtol=1e-4, atol=2e-5)


def test_launch_takes_the_kernel_of_the_matrix():
    x, weight, options = problem(3, 48, 96, None, "all", torch.float16)
    assert tiling_for(weight, options["norm"]) == ring_linear.TABLE[0][2]
    want = ring_linear.launch(x, weight.values, out=x.new_empty(3, 24), **options)
    assert torch.equal(in_interpreter(x, weight, options), want)
    narrower = options | {"norm": options["norm"].float()}  # which that kernel does not take
    assert tiling_for(weight, narrower["norm"]) == TABLE[0]
    got = in_interpreter(x, weight, narrower)
    torch.testing.assert_close(got.double(), definition(x, weight, **narrower), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bits", FORMATS)
def test_kernel_in_fp16(bits):
    x, weight, options = problem(5, 48, 96, bits, "all", torch.float16)
    got = in_interpreter(x, weight, options, SMALL[bits])
    torch.testing.assert_close(got.double(), definition(x, weight, **options), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bits", FORMATS)
def test_kernel_with_shipped_tilings(bits):
    x, weight, options = problem(2, 80, 160, bits, "norm")
    for tiling in TABLE if bits is None else quantized_linear.TABLE[weight.bits]:
        got = in_interpreter(x, weight, options, tiling)
        torch.testing.assert_close(got.double(), definition(x, weight, **options), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("K", (128, 384))
@pytest.mark.parametrize("group", GROUPS)
def test_kernel_with_groups(group, K):
    x, weight, options = problem(9, 48, K, "int4", "all", group=group)
    got = in_interpreter(x, weight, options, SMALL["int4"])
    torch.testing.assert_close(got.double(), definition(x, weight, **options), rtol=1e-4, atol=2e-5)


def test_every_matrix_has_a_class():
    def matrix(N, K, dtype=torch.bfloat16):
        return Weight(torch.empty(N, K, dtype=dtype, device="meta"))

    assert len(TABLE) == len(CLASSES)
    for (N, K), index in {(4096, 4096): 0, (4096, 14336): 0, (28672, 4096): 1, (128256, 2048): 1}.items():
        assert tiling_for(matrix(N, K)) == TABLE[index]
        assert tiling_for(matrix(N, K, torch.float32)) == FP32
    for N, K in ((768, 768), (50304, 768), (2048, 8192), (16384, 2048)):
        assert isinstance(tiling_for(matrix(N, K), matrix(1, K).values[0]), ring_linear.Tiling)
        assert isinstance(tiling_for(matrix(N, K, torch.float16)), ring_linear.Tiling)
        assert tiling_for(matrix(N, K, torch.float32)) == FP32
    assert all(len(entries) == len(quantized_linear.CLASSES) for entries in quantized_linear.TABLE.values())
    for bits in ("int8", "int4"):
        weight = quantize(torch.randn(48, 128), bits)
        assert quantized_linear.tiling_for(weight, torch.bfloat16) == quantized_linear.TABLE[weight.bits][0]
        assert quantized_linear.tiling_for(weight, torch.float32) == quantized_linear.FP32


@pytest.mark.parametrize("bits", FORMATS)
def test_rows_do_not_depend_on_their_number(bits):
    """Bit for bit. NumPy's products of another size add in another order, so here only among tiles of 8 rows and among
    tiles of 16, and with one panel a program. A GPU's do not (tests/gpu)."""
    x, weight, options = problem(33, 48, 96, bits, "all")
    tiling = SMALL[bits] if bits is None else replace(SMALL[bits], panels=1)
    groups = ((8, (1, 2, 5)), (33, (9, 16, 17))) if bits is None else ((33, (1, 5, 8, 9, 16, 17)),)
    for most, fewer in groups:
        everything = in_interpreter(x[-most:], weight, options | {"residual": options["residual"][-most:]}, tiling)
        for M in fewer:
            part = options | {"residual": options["residual"][-M:]}
            assert torch.equal(in_interpreter(x[-M:], weight, part, tiling), everything[-M:])


@pytest.mark.parametrize("bits", ("int8", "int4"))
def test_bits_are_the_slices_alone(bits):
    x, weight, options = problem(3, 80, 384, bits, "all", group=64)
    first = in_interpreter(x, weight, options, quantized_linear.Tiling(1, 4, 1))
    for ahead, unroll in ((2, 2), (3, 1), (9, 1)):
        tiling = quantized_linear.Tiling(1, 4, ahead, unroll)
        assert torch.equal(in_interpreter(x, weight, options, tiling), first)
    assert not torch.equal(in_interpreter(x, weight, options, quantized_linear.Tiling(1, 2, 1)), first)


@pytest.mark.parametrize("shape", ((16, 64), (65, 96), (50, 320), (48, 640)), ids=str)
def test_unpacking_kernel(shape):
    matrix = torch.randn(shape)
    for bits, group in (("int8", 0), *(("int4", group) for group in GROUPS if shape[1] % group == 0)):
        weight = quantize(matrix, bits, group)
        assert torch.equal(unpack.unpacked(weight, torch.float32), dequantize(weight))
        assert torch.equal(unpack.unpacked(weight, torch.float16), dequantize(weight, dtype=torch.float16))


@pytest.mark.parametrize("bits", FORMATS)
def test_twin_against_fp64(bits, monkeypatch):
    monkeypatch.setattr(reference, "LINEAR_ELEMENTS", 96 * 20)  # several blocks
    for fusion in FUSIONS:
        for M in (1, 2, 5, 16, 17, 33):
            x, weight, options = problem(M, 48, 96, bits, fusion)
            got = decode_linear(x, weight, **options)
            torch.testing.assert_close(got.double(), definition(x, weight, **options), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bits", FORMATS)
def test_twin_rows_do_not_depend_on_their_number(bits, dtype):
    for N, K in ((576, 1536), (48, 96), (512, 192)):
        x, weight, options = problem(19, N, K, bits, "all", dtype)
        everything = decode_linear(x, weight, **options)
        assert everything.dtype == dtype
        for M in (1, 2, 4, 5, 8, 16, 17):
            for start in (0, 19 - M):
                rows = slice(start, start + M)
                part = options | {"residual": options["residual"][rows]}
                assert torch.equal(decode_linear(x[rows], weight, **part), everything[rows])


@pytest.mark.parametrize("K", (20, 33, 70))
def test_twin_rows_of_any_width_do_not_depend_on_their_number(K):
    """Rows that do not begin where vector instructions like it."""
    torch.manual_seed(0)
    x, weight = torch.randn(9, K), quantize(torch.randn(66, K), None)
    everything = reference.decode_linear(x, weight)
    for row in range(len(x)):
        assert torch.equal(reference.decode_linear(x[row : row + 1].clone(), weight), everything[row : row + 1])


def test_strided_rows_in_place_and_other_dtypes():
    x, weight, options = problem(3, 48, 96, "int8", "residual")
    wide = torch.randn(3, 200)
    wide[:, 50:146] = x
    want = definition(x, weight, **options)
    residual = options["residual"].clone()
    for run in (
        lambda **kw: decode_linear(wide[:, 50:146], weight, residual=residual, **kw),
        lambda out: launch(wide[:, 50:146], weight, None, 1e-5, None, residual, False, out, SMALL["int8"]),
    ):
        residual.copy_(options["residual"])
        assert run(out=residual) is residual
        torch.testing.assert_close(residual.double(), want, rtol=1e-4, atol=2e-5)
    assert decode_linear(x.bfloat16(), weight, out_dtype=torch.float32).dtype == torch.float32
    assert decode_linear(x[:0], weight).shape == (0, 48)


def test_int8_is_within_half_a_step():
    w = torch.randn(96, 256) * torch.logspace(-6, 3, 96)[:, None]
    w[7] = 0
    packed = quantize(w, "int8")
    assert packed.shape == (96, 256) and packed.bits == 8 and packed.nbytes == 96 * 256 + 96 * 4
    step = w.abs().amax(1, keepdim=True) / 127
    assert ((dequantize(packed) - w).abs() <= 0.501 * step).all()
    assert stored(packed).min() == 128 - 127


@pytest.mark.parametrize("group", GROUPS)
def test_int4_error(group):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(256, 512, generator=generator)
    w[3] = 0
    packed = quantize(w, "int4", group)
    assert packed.shape == (256, 512) and packed.bits == 4
    assert packed.nbytes == 256 * 256 + 2 * 256 * 512 // group
    got = dequantize(packed)
    assert (got[3] == 0).all()
    error = ((got - w).square().sum() / w.square().sum()).item()
    # Normal weights, no search, groups of 64: 0.0090. A layout mistake would make it about 2.
    assert error < {32: 0.0070, 64: 0.0084, 128: 0.0096}[group], error
    # What 4 bits can hold exactly comes back exactly, either sign at the far end.
    exact = torch.randint(-8, 8, (16, 256), generator=generator).float()
    exact[:, ::group] = -8
    scale = torch.tensor([0.25, -0.5]).repeat(8)[:, None]
    assert torch.equal(dequantize(quantize(exact * scale, "int4", group)), exact * scale)


def stored(weight):
    """The bytes of quantised values [N', bytes], by the indices that quantize.py describes, one after another."""
    panels, words = weight.values.shape
    rows = torch.zeros(panels * PANEL, words // 4, dtype=torch.uint8)
    bytes_of_lanes = weight.values.view(torch.uint8).view(panels, words // 128, 32, 4, 4)
    for m, r, j, s, a, k in itertools.product(range(2), range(8), range(4), range(2), range(2), range(2)):
        found = bytes_of_lanes[:, :, 4 * r + j, 2 * s + m, 2 * k + a]
        rows[8 * m + r :: PANEL, 8 * j + 4 * s + 2 * a + k :: 32] = found
    return rows


def test_the_layout_is_the_one_described():
    w = torch.randn(40, 160)
    packed = quantize(w, "int8")
    q = stored(packed)[:40, :160].float() - 128
    assert torch.equal(q * packed.scales[:, None], dequantize(packed))
    assert (stored(packed)[40:] == 128).all()
    packed = quantize(w, "int4", 32)
    rows = stored(packed).view(48, 3, 32)
    q = torch.cat((rows & 15, rows >> 4), dim=2).float() - 8  # [N', chunks, 64]
    order = [8 * (i % 2) + i // 2 for i in range(PANEL)]
    scales = torch.empty(48, 6)
    for place, row in enumerate(order):
        scales[row::PANEL] = packed.scales[:, place::PANEL].t().float()
    got = q.view(48, 6, 32) * scales[..., None]
    assert torch.equal(got.flatten(1)[:40, :160], dequantize(packed))
    assert (got[40:] == 0).all() and (got[:, 5] == 0).all()


def test_quantising_in_chunks_is_the_same(monkeypatch):
    w = torch.randn(90, 128).bfloat16()
    whole = [quantize(w, bits) for bits in ("int8", "int4")]
    monkeypatch.setattr("kernels.quantize.CHUNK_ELEMENTS", 128 * 35)
    for bits, one in zip(("int8", "int4"), whole, strict=True):
        parts = quantize(w, bits)
        assert torch.equal(parts.values, one.values) and torch.equal(parts.scales, one.scales)
        for rows in (slice(13, 41), slice(-1, None), slice(80, 200), slice(90, 200)):
            assert torch.equal(dequantize(one, rows), dequantize(one)[rows])


def test_none_keeps_the_matrix():
    w = torch.randn(32, 64)
    assert quantize(w, None).values is w and torch.equal(dequantize(quantize(w, None)), w)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda w: quantize(w, "int4", 48), "groups of 48"),
        (lambda w: quantize(w[:, :80], "int4", 64), "rows of 80; none would"),
        (lambda w: quantize(w[:, :96], "int4", 64), r"\[32\] would"),
        (lambda w: quantize(w, "int5"), "'int8', 'int4' or None"),
        (lambda w: quantize(w.int(), "int8"), "matrix of floats"),
        (lambda w: quantize(w.log(), "int8"), "NaN or infinity"),
        (lambda w: quantize(w / 0, "int4"), "NaN or infinity"),
        (lambda w: decode_linear(torch.ones(1, 64), w), r"\[rows, 128\]"),
        (lambda w: decode_linear(torch.ones(1, 128).bfloat16(), w), "quantised"),
        (lambda w: decode_linear(torch.ones(1, 128).double(), w), "bfloat16, float16 or float32"),
        (lambda w: decode_linear(torch.ones(1, 24), w[:, :24].contiguous()), "multiples of 16"),
        (lambda w: decode_linear(torch.ones(1, 128), w[:24]), "multiples of 16"),
        (lambda w: decode_linear(torch.ones(1, 128), w, norm=torch.ones(64)), "norm must be"),
        (lambda w: decode_linear(torch.ones(1, 128), w, residual=torch.ones(1, 64), swiglu=True), "residual must be"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(-torch.ones(64, 128))
