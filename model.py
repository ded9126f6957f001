"""The decoder, in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes in the comments: B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim, V vocabulary.
Read from the bottom up: `Transformer` is a list of `Block`s, a `Block` is `Attention` then `MLP`.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import flash_attention, flash_decode, linear_cross_entropy
from rope import parse_rope_scaling, rope_frequencies

VOCAB_MULTIPLE = 64  # the embedding is padded to a multiple of this, so that the matrix units stay aligned
IGNORE_INDEX = -100  # targets with this value carry no loss


def option(default, help):
    """A dataclass field that carries its line of `--help`."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Fields left None are derived in `__post_init__`.

    Raises:
        ValueError: a combination that no decoder can have; the sentence says what would fit.
    """

    vocab_size: int | None = option(None, "token ids in use (none: the tokenizer's)")
    n_layer: int = option(6, "blocks")
    n_head: int = option(8, "query heads")
    n_kv_head: int | None = option(None, "key/value heads: n_head is MHA, 1 is MQA, between is GQA (none: n_head)")
    n_embd: int = option(256, "width of the residual stream")
    head_dim: int | None = option(None, "width of a head (none: n_embd / n_head)")
    d_ff: int | None = option(None, "width of the MLP (none: 8/3 n_embd, up to a multiple of 64)")
    block_size: int = option(256, "longest sequence, in tokens")
    rope_theta: float = option(10000.0, "base of the rotary frequencies")
    rope_scaling: str | None = option(None, "positions past training: linear:2, ntk:4, yarn:4 ... (rope.py has all)")
    norm_eps: float = option(1e-5, "added under the root of RMSNorm")
    tie_embeddings: bool = option(True, "one matrix for the embedding and the head")
    qkv_bias: bool = option(False, "biases on the q, k and v projections (Qwen2)")
    qk_norm: bool = option(False, "RMSNorm on q and k, head by head (Qwen3)")
    sliding_window: int | None = option(None, "tokens each token sees, itself included (Mistral; none: all)")
    dropout: float = option(0.0, "on the embedding and on what each block half adds, in training")

    def __post_init__(self):
        def derive(name, value):
            object.__setattr__(self, name, value)  # the dataclass is frozen

        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} must be at least 1")
        if self.n_kv_head is None:
            derive("n_kv_head", self.n_head)
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            fits = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}: choose one of {fits}")
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                near = self.n_embd // self.n_head * self.n_head
                raise ValueError(
                    f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: "
                    f"use n_embd={near or self.n_head} or {near + self.n_head}, or set head_dim"
                )
            derive("head_dim", self.n_embd // self.n_head)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, since rotary positions turn pairs of channels")
        if self.d_ff is None:
            derive("d_ff", math.ceil(8 * self.n_embd / 3 / 64) * 64)
        if self.d_ff < 1:
            raise ValueError(f"d_ff={self.d_ff} must be at least 1")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1 (or none)")
        for name in ("vocab_size", "n_layer", "n_embd", "d_ff", "head_dim", "block_size", "sliding_window"):
            if (getattr(self, name) or 0) >= 2**31:
                raise ValueError(f"{name}={getattr(self, name)} must be below 2**31")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("rope_theta and norm_eps must be above 0")
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling)  # refuses what it cannot read
            if self.head_dim < 4 or self.rope_theta <= 1:
                raise ValueError("rope_scaling needs a head_dim of at least 4 and a rope_theta above 1")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size up to a multiple of 64."""
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def matmul_params(self) -> int:
        """Weights that multiply every token: all matrices with the head, without the embedding look-up."""
        attention = self.n_embd * self.head_dim * (2 * self.n_head + 2 * self.n_kv_head)  # q and o, k and v
        mlp = 3 * self.n_embd * self.d_ff
        return self.n_layer * (attention + mlp) + self.n_embd * self.padded_vocab_size

    def n_params(self) -> int:
        """Parameters in memory, with the padding of the vocabulary; tied embeddings count once."""
        embedding = 0 if self.tie_embeddings else self.n_embd * self.padded_vocab_size
        norms = (2 * self.n_layer + 1) * self.n_embd
        biases = self.n_layer * self.head_dim * (self.n_head + 2 * self.n_kv_head) if self.qkv_bias else 0
        qk_norms = self.n_layer * 2 * self.head_dim if self.qk_norm else 0
        return self.matmul_params() + embedding + norms + biases + qk_norms

    def flops_per_token(self, seq_len: int, causal: bool = False) -> int:
        """Floating-point operations to train one token (forward and backward) in sequences of `seq_len`.

        Six per weight (a multiply and an add, once forward and twice backward), and for attention
        12 * n_layer * n_head * head_dim * seq_len: the scores and the weighted sum, over the full T x T square.
        `causal=True` counts the lower triangle alone. n_kv_head enters through the k and v projections only.
        The full square is the convention of PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT, and of our MFU.
        """
        span = min(seq_len, self.sliding_window or seq_len)
        attention = 12 * self.n_layer * self.n_head * self.head_dim * span
        return 6 * self.matmul_params() + (attention // 2 if causal else attention)

    def kv_cache_bytes(self, batch_size: int, length: int, bytes_per_element: int = 2) -> int:
        """Bytes of a cache for `length` tokens in each of `batch_size` rows: K and V of every layer and KV head."""
        return 2 * self.n_layer * batch_size * self.n_kv_head * length * self.head_dim * bytes_per_element


class Linear(nn.Linear):
    """nn.Linear that computes in the dtype of its input: fp32 master weights are cast where they are used."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_table(positions, config):
    """Cosines and sines of the rotary angles (Su et al. 2021), always in fp32.

    positions: int [T] or [B, T] -> two tensors [T, D/2] or [B, 1, T, D/2]. They are made anew for each call: a
    buffer would follow the module into bf16, where positions past 256 are no longer whole numbers.
    """
    inv_freq, attention_factor = rope_frequencies(config, positions.device)
    angles = positions.unsqueeze(-1).float() * inv_freq
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)  # room for the heads
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(x, rope):
    """Turn channel pairs (i, i + D/2) of x [B, heads, T, D] by their angles: the half-split layout of Hugging Face."""
    cos, sin = rope
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of every token so far: [n_layer, B, G, length, D] each, allocated once and never moved."""

    def __init__(self, config: ModelConfig, batch_size: int, length: int, device=None, dtype=None):
        shape = (config.n_layer, batch_size, config.n_kv_head, length, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)

    @property
    def length(self) -> int:
        return self.k.shape[3]

    def write(self, layer, positions, k, v):
        """Store k, v [B, G, T, D] of one layer at positions [B, T]; returns that layer's whole k, v."""
        row = torch.arange(positions.shape[0], device=positions.device)[:, None]  # [B, 1] beside positions [B, T]
        self.k[layer][row, :, positions] = k.transpose(1, 2)
        self.v[layer][row, :, positions] = v.transpose(1, 2)
        return self.k[layer], self.v[layer]


class Attention(nn.Module):
    """Causal self-attention with n_head query heads over n_kv_head keys and values (Ainslie et al. 2023).

    Query head h reads KV head h // (n_head / n_kv_head). MHA, GQA and MQA are this one code path.
    """

    def __init__(self, config: ModelConfig, layer: int, backend: str | None):
        super().__init__()
        self.config, self.layer, self.backend = config, layer, backend
        C, D = config.n_embd, config.head_dim
        self.q_proj = Linear(C, config.n_head * D, bias=config.qkv_bias)
        self.k_proj = Linear(C, config.n_kv_head * D, bias=config.qkv_bias)
        self.v_proj = Linear(C, config.n_kv_head * D, bias=config.qkv_bias)
        self.o_proj = Linear(config.n_head * D, C, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, config.norm_eps), RMSNorm(D, config.norm_eps)

    def qkv(self, x, rope):
        """x [B, T, C] -> q [B, H, T, D], k and v [B, G, T, D]; q and k normalised if asked, then turned."""
        B, T, _ = x.shape
        q, k, v = (
            proj(x).view(B, T, -1, self.config.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def merge(self, y):
        """y [B, H, T, D] -> [B, T, C]: heads side by side, then the output projection."""
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, rope, doc_start):
        q, k, v = self.qkv(x, rope)
        window = self.config.sliding_window
        return self.merge(flash_attention(q, k, v, window=window, doc_start=doc_start, backend=self.backend))

    def decode(self, x, rope, positions, cache):
        q, k, v = self.qkv(x, rope)
        k, v = cache.write(self.layer, positions, k, v)
        cache_len = (positions[:, -1] + 1).int()  # [B]: what has been written so far, the new tokens included
        return self.merge(flash_decode(q, k, v, cache_len, window=self.config.sliding_window))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.d_ff, bias=False)
        self.up_proj = Linear(config.n_embd, config.d_ff, bias=False)
        self.down_proj = Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm: each half reads a normalised copy of the residual stream and adds to it."""

    def __init__(self, config: ModelConfig, layer: int, backend: str | None):
        super().__init__()
        self.attention_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config, layer, backend)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope, doc_start):
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, doc_start))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def decode(self, x, rope, positions, cache):
        x = x + self.attention.decode(self.attention_norm(x), rope, positions, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The decoder-only language model.

    Args:
        config: its shape; `config.vocab_size` must be set.
        attention: the backend of `kernels.flash_attention` (None: chosen for the device).
        dtype: what activations are computed in (None: the dtype of the parameters). Training keeps fp32
            parameters and passes bfloat16 here.
    """

    def __init__(self, config: ModelConfig, attention: str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("ModelConfig.vocab_size must be set to build a model: use the tokenizer's")
        self.config, self.dtype = config, dtype
        self.embed = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, layer, attention) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None):
        """Draw the starting weights, such that the first loss is ln(vocab_size) and depth does not matter.

        Projections into a block have variance 1 / fan_in; projections out of a block and an untied head start at
        zero, so that every block begins as the identity and the logits are exactly equal. A tied head cannot be
        zero: it is the embedding. A token then meets its own row, with a logit of about std * n_embd, among others
        of deviation std * sqrt(n_embd); std keeps the two together from adding more than 0.05 to the loss.
        """
        C, V = self.config.n_embd, self.config.vocab_size
        tied_std = min(0.15 / math.sqrt(C), math.log(1 + 0.02 * V) / C)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name == "embed.weight":
                parameter.normal_(0.0, tied_std if self.config.tie_embeddings else 1.0, generator=generator)
            elif name == "head.weight" or name.endswith((".bias", "o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        return self

    def logits(self, x):
        """x [B, T, C] -> [B, T, vocab_size]: the columns that pad the vocabulary are cut off, so they never win."""
        return self.head(self.norm(x))[..., : self.config.vocab_size]

    def loss(self, x, targets):
        """x [B, T, C], targets [B, T] -> their mean cross-entropy; the padding of the vocabulary takes no part."""
        x = self.norm(x).flatten(0, 1)  # [B T, C]
        weight = self.head.weight.to(x.dtype)
        return linear_cross_entropy(x, weight, targets.flatten(), self.config.vocab_size, IGNORE_INDEX)

    def embedded(self, tokens):
        """tokens int64 [B, T] -> [B, T, C] in the compute dtype."""
        x = self.embed(tokens)
        return self.dropout(x if self.dtype is None else x.to(self.dtype))

    def forward(self, tokens, targets=None, doc_start=None):
        """Train or score whole sequences.

        Args:
            tokens: int64 [B, T], T <= block_size.
            targets: int64 [B, T], the token that follows each position, or -100 where there is no loss.
            doc_start: int32 [B, T], where the document of each position starts in its row. Tokens then see their own
                document alone, and positions count from its start, as if each document were a sequence of its own.

        Returns:
            logits [B, T, vocab_size]; with targets, the mean loss in nats per counted target (fp32 scalar).
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if doc_start is not None:
            positions = positions - doc_start  # [B, T]
        rope = rope_table(positions, self.config)
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x, rope, doc_start)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def decode(self, tokens, positions, cache, last_only=False):
        """Continue sequences whose earlier tokens are in the cache; the new ones are added to it.

        Args:
            tokens: int64 [B, T], the next T tokens of each row.
            positions: int64 [B, T], where they stand: consecutive within a row, below `cache.length`.
            cache: the KVCache to read and extend.
            last_only: compute logits for the last position alone (prefill).

        Returns:
            logits [B, T, vocab_size], or [B, 1, vocab_size] with last_only.
        """
        rope = rope_table(positions, self.config)
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer.decode(x, rope, positions, cache)
        return self.logits(x[:, -1:] if last_only else x)
