"""A model's weights packed for decoding, and its cache: `Decoder.prefill` reads a prompt, `Decoder.step` goes on.

`Transformer.decode` says what is computed; this computes the same in few kernels (the products that share an input are
one, norms and activations ride along) and from weights that may be quantised. It runs on a CPU too, through the plain
functions behind the kernels.

A step takes T tokens of each of B rows. The bits of a token depend on nothing but its row, the tokens before it and the
cache: neither on T nor on B nor on the rows beside it, since every kernel walks tiles of a fixed size and splits its
sums by position alone. Batches that equal single rows, and speculation that equals plain decoding, rest on that.

Shapes in the comments: B rows, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim, F d_ff, V vocabulary, S slots.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data import UserError
from kernels import flash_attention, flash_decode, reference, rope_and_attend, rope_and_cache, rope_angles
from kernels.decode_linear import MULTIPLE, decode_linear, unpacked
from kernels.flash_decode import why_not_triton
from kernels.quantize import GROUPS, Weight, pack_gate_up, quantize
from model import ModelConfig, Transformer
from rope import rope_frequencies

CHUNK = 128  # tokens: the unit in which prompts are read and the cache grows
LONG_CHUNK = 4096  # of a prefill step as long as so many tokens are left
QUANT = (None, "int8", "int4")
KV = ("auto", "int8")
GIB = 2**30


def whole_chunks(length: int) -> int:
    """`length` up to a multiple of CHUNK."""
    return -(-length // CHUNK) * CHUNK


class Cache:
    """Keys and values of B rows of S slots: k, v [n_layer, B, G, S, D], allocated once.

    int8 ones carry scales [n_layer, B, G, S] in fp32, one for each token and KV head.
    """

    def __init__(self, config: ModelConfig, batch: int, slots: int, device, dtype: torch.dtype, kv: str = "auto"):
        shape = (config.n_layer, batch, config.n_kv_head, slots, config.head_dim)
        refuse_too_large(config, batch, slots, device, dtype, kv)
        self.slots = slots
        self.k, self.v = (torch.zeros(shape, device=device, dtype=torch.int8 if kv == "int8" else dtype) for _ in "kv")
        self.k_scale = self.v_scale = None
        if kv == "int8":
            self.k_scale, self.v_scale = (torch.zeros(shape[:4], device=device) for _ in "kv")

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None)

    def layer(self, layer: int, row: int | None = None) -> tuple[Tensor, Tensor, dict]:
        """k and v [B, G, S, D] of one layer, of one `row` if asked, and their scales by name."""
        rows = slice(None) if row is None else slice(row, row + 1)
        scales = (
            {} if self.k_scale is None else {"k_scale": self.k_scale[layer, rows], "v_scale": self.v_scale[layer, rows]}
        )
        return self.k[layer, rows], self.v[layer, rows], scales

    def copy_row(self, source: int, targets: slice, length: int):
        """Give rows `targets` the first `length` slots of row `source`."""
        for x in (self.k, self.v, self.k_scale, self.v_scale):
            if x is not None:
                x[:, targets, :, :length] = x[:, source : source + 1, :, :length]


def cache_bytes(config: ModelConfig, batch: int, slots: int, dtype: torch.dtype, kv: str = "auto") -> int:
    """Bytes of a `Cache`, scales included."""
    if kv != "int8":
        return config.kv_cache_bytes(batch, slots, dtype.itemsize)
    return config.kv_cache_bytes(batch, slots, 1) * (config.head_dim + 4) // config.head_dim


def memory_left(device: torch.device) -> int:
    """Bytes that may still be allocated on a device; elsewhere than on CUDA all that the machine has, if it tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(config, batch, slots, device, dtype, kv):
    """UserError for a cache that cannot be allocated, with what it would need and what would fit."""
    need, left = cache_bytes(config, batch, slots, dtype, kv), memory_left(torch.device(device))
    if need <= left:
        return
    fits = int(left / need * slots) // CHUNK * CHUNK
    advice = [f"{fits} tokens a row would"] if fits else []
    advice += ["int8 would need half (--kv int8)"] if kv != "int8" else []
    advice += [f"{left // (need // batch)} rows would"] if batch > 1 and left >= need // batch else []
    raise UserError(
        f"a KV cache of {batch} x {slots} tokens needs {need / GIB:.1f} GiB ({config.n_layer} layers, "
        f"{config.n_kv_head} KV heads of {config.head_dim}), and {left / GIB:.1f} GiB are left on {device}"
        f"{': ' if advice else ''}{', '.join(advice)}"
    )


def attend(q, k, v, lengths, window, scales) -> Tensor:
    """`flash_decode`. On a CPU each token goes by itself, over the keys that it sees and no others: its bits depend on
    its position alone, and PyTorch's attention needs no mask."""
    if q.is_cuda:
        return flash_decode(q, k, v, lengths, window=window, **scales)
    (_, heads, tokens, head_dim), heads_kv = q.shape, k.shape[1]
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        for t in range(max(tokens - length, 0), tokens):
            last = length - tokens + t + 1
            seen = slice(max(last - window, 0) if window else 0, last)
            keys, values = k[row : row + 1, :, seen], v[row : row + 1, :, seen]
            if scales:
                keys = (keys * scales["k_scale"][row : row + 1, :, seen, None]).to(q.dtype)
                values = (values * scales["v_scale"][row : row + 1, :, seen, None]).to(q.dtype)
            # The query heads that share keys are the queries of one head: all of them see all of these keys. A copy:
            # in which order PyTorch adds up depends on where numbers begin and lie in memory, which T would decide.
            queries = q[row, :, t].clone(memory_format=torch.contiguous_format).view(1, heads_kv, -1, head_dim)
            out[row, :, t] = F.scaled_dot_product_attention(queries, keys, values).view(heads, head_dim)
    return out


def spread(x, rows, count) -> Tensor:
    """x [n, C] -> [count, C] with x in the given rows and zeros elsewhere; all of x if rows is None."""
    return x if rows is None else x.new_zeros(count, x.shape[1]).index_copy_(0, rows, x)


def linear(x, weight: Weight, **options) -> Tensor:
    """`decode_linear`, or its plain definition on a CPU and for the odd shape that the kernel does not take."""
    if x.is_cuda:
        if not any(size % MULTIPLE for size in weight.shape):
            return decode_linear(x, weight, **options)
        warnings.warn(f"a weight of {weight.shape} does not fit the decoding kernel and is slow", stacklevel=2)
    return reference.decode_linear(x, weight, **options).to(x.dtype)


def wide_linear(x, weight: Weight, bias=None) -> Tensor:
    """x W^T + bias for many rows, by PyTorch: a quantised matrix is written out in x's dtype first, for this once."""
    return F.linear(x, unpacked(weight, x.dtype), bias)


def swiglu(x) -> Tensor:
    """x [T, 2F], gate and up in turn as `pack_gate_up` has them -> silu(gate) * up [T, F] (Shazeer 2020)."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


@dataclass
class Layer:
    """The weights of one block."""

    attention_norm: Tensor  # [C]
    qkv: Weight  # [(H + 2G) D, C]: q, k and v above one another
    qkv_bias: Tensor | None  # [(H + 2G) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Weight  # [C, H D]
    mlp_norm: Tensor  # [C]
    gate_up: Weight  # [2F, C]: gate and up interleaved
    down: Weight  # [C, F]

    @property
    def weights(self) -> list[Weight]:
        return [self.qkv, self.o, self.gate_up, self.down]


class Decoder:
    """A decoder-only model, packed. `Decoder.of(model)` packs one, `Decoder.random(config, ...)` makes one up.

    Args:
        config: its shape.
        take: gives the parameter of a name, as in `Transformer.named_parameters()`, on the device, in the dtype of
            activations. Asked for each name once, layer by layer, so that a taker may let go of what it gave.
        quant: "int8" (one scale for each output channel), "int4" (one for each group of 64 inputs) or None. All
            matrices and the head are quantised; the embedding, of which a token reads one row, is not.
        attention: the backend of `kernels.flash_attention` in prefill (None: chosen for the device).
    """

    @torch.no_grad()
    def __init__(
        self, config: ModelConfig, take: Callable[[str], Tensor], quant: str | None = None, attention: str | None = None
    ):
        if quant not in QUANT:
            raise ValueError(f"quant={quant!r} must be one of {', '.join(map(str, QUANT))}")
        self.config, self.quant, self.attention = config, quant, attention
        self.embed = take("embed.weight")  # [V, C]
        self.layers = [self._pack(f"layers.{layer}.", take) for layer in range(config.n_layer)]
        self.norm = take("norm.weight")
        self.head = self._quantize(self.embed if config.tie_embeddings else take("head.weight"))
        self.device, self.dtype = self.embed.device, self.embed.dtype
        self.inv_freq, self.attention_factor = rope_frequencies(config, self.device)

    def _quantize(self, matrix):
        group = next((g for g in (64, *GROUPS) if matrix.shape[1] % g == 0), GROUPS[0])
        try:
            return quantize(matrix.contiguous(), self.quant, group)
        except ValueError as error:
            raise UserError(f"--quant {self.quant}: {error}") from None

    def _pack(self, prefix, take):
        config = self.config
        qkv = torch.cat([take(f"{prefix}attention.{name}_proj.weight") for name in "qkv"])
        bias = norms = None
        if config.qkv_bias:
            bias = torch.cat([take(f"{prefix}attention.{name}_proj.bias") for name in "qkv"])
        if config.qk_norm:
            norms = [take(f"{prefix}attention.{name}_norm.weight") for name in "qk"]
        gate_up = pack_gate_up(take(f"{prefix}mlp.gate_proj.weight"), take(f"{prefix}mlp.up_proj.weight"))
        return Layer(
            attention_norm=take(f"{prefix}attention_norm.weight"),
            qkv=self._quantize(qkv),
            qkv_bias=bias,
            q_norm=norms and norms[0],
            k_norm=norms and norms[1],
            o=self._quantize(take(f"{prefix}attention.o_proj.weight")),
            mlp_norm=take(f"{prefix}mlp_norm.weight"),
            gate_up=self._quantize(gate_up),
            down=self._quantize(take(f"{prefix}mlp.down_proj.weight")),
        )

    @classmethod
    def of(cls, model: Transformer, quant: str | None = None, release: bool = False) -> "Decoder":
        """Pack a Transformer, in the dtype it computes in.

        Tensors that need no change are shared with the model. With `release` the model gives each of its weights up
        as soon as it is packed, so that there are never two copies, and cannot be used afterwards.
        """
        parameters = dict(model.named_parameters())
        dtype = model.dtype or model.embed.weight.dtype

        def take(name):
            parameter = parameters[name]
            tensor = parameter.detach().to(dtype)
            if release:
                parameter.data = parameter.data.new_empty(0)
            return tensor

        return cls(model.config, take, quant, model.layers[0].attention.backend)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        quant: str | None = None,
        seed: int = 0,
    ) -> "Decoder":
        """Random weights made on the device, each quantised before the next is made: for measurements.

        Matrices have variance 1 / fan_in and the norms are ones, so activations stay of order 1 at any depth.
        """
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}
        generator = torch.Generator(device).manual_seed(seed)

        def take(name):
            if name.endswith("norm.weight"):
                return torch.ones(shapes[name], device=device, dtype=dtype)
            tensor = torch.empty(shapes[name], device=device, dtype=dtype)
            return tensor.normal_(0.0, shapes[name][-1] ** -0.5, generator=generator)

        return cls(config, take, quant)

    def cache(self, batch: int, slots: int, kv: str = "auto") -> Cache:
        """An empty cache for this model. kv: "auto" (the dtype of activations) or "int8". UserError if too large."""
        return Cache(self.config, batch, slots, self.device, self.dtype, kv)

    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it reads a row for each token."""
        norms = [layer.attention_norm for layer in self.layers] + [layer.mlp_norm for layer in self.layers]
        matrices = [weight for layer in self.layers for weight in layer.weights] + [self.head]
        return sum(x.nbytes for x in [*norms, *matrices, self.norm])

    @torch.no_grad()
    def step(self, x: Tensor, start: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """Take T more tokens of each row through the model; their keys and values enter the cache.

        No value is read by the host and no shape depends on one: it can be captured as a CUDA graph.

        Args:
            x: [B T, C], the embeddings of the tokens, row by row.
            start: int32 [B], where each row's first token stands. Negative positions are not written.
            lengths: int32 [B], valid tokens of each row's cache, the new ones included: start + T, or 0 for a row that
                has ended.

        Returns:
            logits [B T, V'], with the columns that pad the vocabulary.
        """
        config, eps, batch = self.config, self.config.norm_eps, len(start)
        width, rows = len(x) // batch, None  # rows: those of x that go through the products; None for all
        if not x.is_cuda and not (running := lengths > 0).all():
            # A GPU carries rows that have ended along. A CPU takes them out of the products, where each costs its time.
            rows = running.repeat_interleave(width).nonzero()[:, 0]
            x = x[rows]
        angles = None
        if x.is_cuda and why_not_triton(x.device.index, config.head_dim, x.dtype) is None:
            angles = rope_angles(start, width, self.inv_freq, self.attention_factor)
        for i, layer in enumerate(self.layers):
            k, v, scales = cache.layer(i)
            qkv = linear(x, layer.qkv, norm=layer.attention_norm, eps=eps, bias=layer.qkv_bias)
            qkv = spread(qkv, rows, width * batch).view(batch, width, -1)
            if angles is not None:
                norms = dict(q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps)
                options = dict(n_head=config.n_head, window=config.sliding_window, **norms, **scales)
                y = rope_and_attend(qkv, lengths, angles, k, v, **options)  # [B, H, T, D]
            else:
                q = self._rope_and_cache(layer, qkv, start, k, v, scales)
                y = attend(q, k, v, lengths, config.sliding_window, scales)
            y = y.transpose(1, 2).reshape(batch * width, -1)  # [B T, H D]
            y = y if rows is None else y[rows]
            x = linear(y, layer.o, residual=x)
            h = linear(x, layer.gate_up, norm=layer.mlp_norm, eps=eps, swiglu=True)  # [B T, F]
            x = linear(h, layer.down, residual=x)
        return spread(linear(x, self.head, norm=self.norm, eps=eps), rows, width * batch)

    def _rope_and_cache(self, layer, qkv, start, k, v, scales):
        return rope_and_cache(
            qkv,
            start,
            self.inv_freq,
            k,
            v,
            n_head=self.config.n_head,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.norm_eps,
            attention_factor=self.attention_factor,
            **scales,
        )

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int], cache: Cache, row: int, start: int = 0):
        """Read tokens[start:] into a row of the cache, which holds those before. Nothing is chosen yet: the caller
        keeps the last token of a prompt for the first `step`.

        It is read in pieces of LONG_CHUNK tokens. A GPU pads the last one to whole chunks, so that few shapes occur (no
        kernel is compiled for any of them); what the padding leaves in the cache is overwritten before it is read.
        """
        padded = self.device.type == "cuda"
        # From pinned memory: the host goes on while the GPU is busy.
        ids = torch.tensor(tokens, pin_memory=padded).to(self.device, non_blocking=True)
        while start < len(ids):
            size = min(LONG_CHUNK, whole_chunks(len(ids) - start))
            chunk = ids[start : start + size]
            room = min(size, cache.slots - start) if padded else len(chunk)
            place = torch.full((1,), start, dtype=torch.int32, device=self.device)
            self.read(F.pad(chunk, (0, room - len(chunk))), place, start, cache, row)
            start += size

    @torch.no_grad()
    def read(self, chunk: Tensor, place: Tensor, start: int, cache: Cache, row: int):
        """Keys and values of `chunk`, integers [T] at positions start, start + 1 ... of a row, into its cache. `place`
        is `start` once more, int32 [1] on the device."""
        config, eps, end = self.config, self.config.norm_eps, start + len(chunk)
        x = F.embedding(chunk, self.embed)  # [T, C]
        for i, layer in enumerate(self.layers):
            k, v, scales = cache.layer(i, row=row)
            h = F.rms_norm(x, layer.attention_norm.shape, layer.attention_norm, eps)
            qkv = wide_linear(h, layer.qkv, layer.qkv_bias)
            q = self._rope_and_cache(layer, qkv[None], place, k, v, scales)  # [1, H, T, D]
            if i == config.n_layer - 1:
                return  # its keys and values are in the cache, and nothing else is wanted of the last layer
            k, v = k[:, :, :end], v[:, :, :end]
            if scales:
                k = (k * scales["k_scale"][:, :, :end, None]).to(q.dtype)
                v = (v * scales["v_scale"][:, :, :end, None]).to(q.dtype)
            y = flash_attention(q, k, v, window=config.sliding_window, backend=self.attention)
            x = x + wide_linear(y.transpose(1, 2).reshape(len(chunk), -1), layer.o)
            h = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, eps)
            x = x + wide_linear(swiglu(wide_linear(h, layer.gate_up)), layer.down)
