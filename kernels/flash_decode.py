"""Flash decoding: attention of a few new tokens over a long KV cache, at the speed of memory.

The mathematics. The cache is cut into chunks of fixed length. Each chunk c gives, for each query row, its own softmax:
a result out_c and the logarithm of its sum of exponentials lse_c. Any order puts them together exactly,

    out = sum_c w_c out_c / sum_c w_c        with w_c = exp(lse_c - max lse)

so one row's cache can be read by the whole chip at once (split-KV). One token does two operations for each number it
reads, a hundred times too few to keep the arithmetic busy: all that counts is that every byte of the cache is read
once, and that enough of them are on their way at any time.

The tiling. All query heads that share a KV head, times the T new tokens, are the rows of tiles of 16; a program keeps
up to four such tiles and streams one chunk past them:

                      chunk 0        chunk 1        chunk 2    cache_len      slots
    row 0  ┌      ┌──────────────┬──────────────┬───────────┐┈┈┈┊┈┈┈┈┈┈┈┈┈┈┈┈┈┊     row = head in group * T + token
      ...  │ 16   │   out_0      │   out_1      │   out_2   │   not read       ┊
    row 15 └      └──────────────┴──────────────┴───────────┘┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┊     then: combine

Lengths are read on the device, so a captured CUDA graph is right at every length. The grid is what the chip holds at
once; its programs share out the chunks that exist, and those that get none leave. Where there are few chunks the last
program to arrive at a row combines it, and where there are many a second kernel does.

Short chunks keep the chip busy while the text is short, long ones cost less to combine when it is long. So chunks grow
with the position of the first new token, twice: at the two `turning_points` of a model.

A row's bits depend on its own query and the keys before it, on nothing else: chunks begin at fixed positions, a tile
always has 16 rows, and a key that a row does not see adds an exact zero. One token alone, as one of five, in a batch
of 32 or in a larger cache gives the same bits, which is what makes speculation and batches exact; but the five must
lie on one side of a turning point. Whoever verifies drafts accepts none beyond it.

Source: Flash-Decoding, Dao et al. 2023 (crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import math
import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels import reference

try:
    import triton
except ImportError:  # no Triton for this system: plain PyTorch does the work
    triton = None
else:
    from kernels.flash_attention_forward import LOG2_E, empty_heads
    from kernels.flash_decode_kernels import combine_kernel, split_kernel
    from kernels.interpreter import INTERPRETED
    from kernels.overlap import launch_options
    from kernels.tiles import MAX_HEAD_DIM, MIN_HEAD_DIM, device_limits

ROWS = reference.DECODE_ROWS
MAX_TILES = 4  # tiles of ROWS query rows that one program keeps in registers
NEAR, NEAR_END = 128, 2048  # keys of a chunk of a short text, and the position up to which a text is short
RUN = 32  # chunks that are merged one after another; a cache of no more is combined by the last program to arrive
FOLDED = 256  # chunks of all rows of a KV head up to which one program combines them faster than a second launch
MAX_TOKENS = 32  # new tokens of a row up to which a cache's plan holds; more of them are combined by the second kernel
OTHER_SHARED = 8 * 1024  # bytes of shared memory that a program needs beside its tiles
COUNTERS = 2**18  # int32 counters of arrivals, one for each (row of the batch, KV head, block of query rows)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Chunks:
    """Keys of a chunk, by the position of the first new token: `near` before ends[0], `middle` before ends[1], `far`
    from there on. All are multiples of a tile's keys."""

    near: int
    middle: int
    far: int
    ends: tuple[int, int]

    def room(self, slots: int, tokens: int) -> int:
        """Chunks that a row of so many slots can have, when its last `tokens` are new."""
        kinds = ((self.near, self.ends[0]), (self.middle, self.ends[1]), (self.far, slots))
        return max(math.ceil(min(slots, end + tokens) / keys) for keys, end in kinds)


@cache
def chunks_for(heads_kv: int) -> Chunks:
    """For a model with so many KV heads: the fewer there are, the more chunks a head needs to occupy the chip."""
    middle = min(max(64 * heads_kv, 128), 512)
    far = min(max(256 * heads_kv, 512), 2048)
    return Chunks(NEAR, middle, far, (NEAR_END, (RUN - 1) * middle))  # one chunk fewer than RUN: T tokens may cross


def turning_points(heads_kv: int) -> tuple[int, int]:
    """Positions at which the chunks of a model change, see above."""
    return chunks_for(heads_kv).ends


@dataclass(frozen=True)
class Plan:
    """How one shape of cache is read: keys of its chunks and of a tile, warps of a program, stages of the pipeline that
    prefetches tiles, programs for each multiprocessor, and whether the first kernel also combines."""

    chunks: Chunks
    keys: int
    warps: int
    stages: int
    programs: int
    fused: bool


INTERPRETER = Plan(Chunks(32, 64, 96, (64, 192)), 32, 4, 1, 1, fused=True)  # small: short caches have several of all


def tile_bytes(keys: int, head_dim: int, element_size: int) -> int:
    """Shared memory of one tile of K and of V."""
    return 2 * keys * triton.next_power_of_2(head_dim) * element_size


def programs_that_fit(keys: int, stages: int, head_dim: int, element_size: int, shared_memory: int) -> int:
    """Programs that one multiprocessor holds at a time: by their tiles in shared memory, and by registers at most 4."""
    used = max(stages - 1, 1) * tile_bytes(keys, head_dim, element_size) + OTHER_SHARED
    return min(max(shared_memory // used, 1), 4)


def plan_for_chip(slots: int, heads_kv: int, head_dim: int, element_size: int, shared_memory: int) -> Plan:
    """The Plan for a cache `[B, heads_kv, slots, head_dim]` of elements of so many bytes, on a chip with so many bytes
    of shared memory a program.

    Of these, all but `slots` may change a row's bits, and nothing else may come in, or a row would depend on the
    size of its batch. Chosen by `python -m bench.decode_attention --sweep` on an H200.
    """
    keys = min(max(8192 // triton.next_power_of_2(head_dim), 32), 128)
    stages = 1  # fp32 is for exactness, not for speed
    if element_size < 4:  # one tile is being worked on, the others are on their way
        stages = min(3, 1 + (shared_memory - OTHER_SHARED) // tile_bytes(keys, head_dim, element_size))
    programs = programs_that_fit(keys, stages, head_dim, element_size, shared_memory)
    chunks = chunks_for(heads_kv)
    return Plan(chunks, keys, 4, stages, programs, fused=chunks.room(slots, MAX_TOKENS) <= RUN)


def plan_for(slots: int, heads_kv: int, head_dim: int, element_size: int, device: torch.device) -> Plan:
    """`plan_for_chip` of the device a cache is on."""
    if device.type == "cpu":
        return replace(INTERPRETER, fused=slots <= 256)
    return plan_for_chip(slots, heads_kv, head_dim, element_size, device_limits(device.index)[0])


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
CAPTURED = -1  # in place of a stream: the counters of captured graphs


def arrival_counters(device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros, int32 `[COUNTERS]`.

    Kernels of different streams may overlap, so each stream has its own. Captured graphs share one set, made before
    the first capture: two graphs that use flash_decode must not be replayed at the same time.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if capturing and (device, CAPTURED) not in _COUNTERS:
        raise RuntimeError("flash_decode: call it once before it is captured in a CUDA graph, so that it can allocate")
    for key in [CAPTURED] if capturing else [CAPTURED, stream]:
        if (device, key) not in _COUNTERS:
            _COUNTERS[device, key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _COUNTERS[device, CAPTURED if capturing else stream]


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """`flash_decode` by the Triton kernels, on a GPU or in the interpreter; `plan` in place of `plan_for`'s choice."""
    batch, heads_q, tokens, head_dim = q.shape
    heads_kv, slots = k_cache.shape[1], k_cache.shape[2]
    group = heads_q // heads_kv
    out = empty_heads(q, tokens, heads_q)
    if out.numel() == 0 or slots == 0:
        return out.zero_()
    plan = plan or plan_for(slots, heads_kv, head_dim, k_cache.element_size(), q.device)
    tiles = triton.cdiv(group * tokens, ROWS)
    tiles_each = min(triton.next_power_of_2(tiles), MAX_TILES if head_dim <= 128 else 1)
    blocks = triton.cdiv(tiles, tiles_each)
    chunks = plan.chunks.room(slots, tokens)
    single = chunks == 1
    fused = plan.fused and chunks <= RUN and group * tokens * chunks <= FOLDED and not single

    if fused and batch * heads_kv * blocks > COUNTERS:
        raise ValueError(
            f"flash_decode: {batch} rows of {heads_kv} KV heads and {tokens} tokens are too many: decode fewer"
        )
    partial = lse = counters = None
    if not single:
        partial = q.new_empty(batch, heads_q, tokens, chunks, head_dim, dtype=torch.float32)
        lse = q.new_empty(batch, heads_q, tokens, chunks, dtype=torch.float32)
    if fused:
        counters = arrival_counters(q.device)
    sizes = dict(heads_kv=heads_kv, group=group, tokens=tokens, slots=slots, chunks=chunks, window=window or 0)
    sizes |= dict(chunking=(plan.chunks.near, plan.chunks.middle, plan.chunks.far, *plan.chunks.ends))
    constants = dict(HEAD_DIM=head_dim, WINDOW=window is not None)
    # Two kernels do not overlap: programs of the second would stand where the first one's could read.
    constants |= launch_options(q.device) if single or fused else dict(OVERLAP=False)
    scales = [None if s is None else (s, *s.stride()[:2]) for s in (k_scale, v_scale)]
    q, k, v, out_rows = ((x, *x.stride()[:3]) for x in (q, k_cache, v_cache, out))
    # More tiles take more registers, and no more than two programs of a multiprocessor have them.
    programs = plan.programs if tiles_each == 1 else min(plan.programs, 2)
    programs *= 3 if out.device.type == "cpu" else device_limits(out.device.index)[2]
    split_kernel[(min(programs, batch * heads_kv * blocks * chunks),)](
        q, k, v, *scales, out_rows, cache_len, partial, lse, counters, batches=batch, blocks=blocks,
        scale_log2=(1.0 / math.sqrt(head_dim) if scale is None else scale) * LOG2_E, **sizes, **constants,
        TILES=tiles_each, BLOCK_M=ROWS, BLOCK_N=plan.keys, BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_R=min(triton.next_power_of_2(group * tokens), ROWS) if fused else ROWS,
        QUANTIZED=k_scale is not None, SINGLE=single, FUSED=fused, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if not single and not fused:
        log_runs = max(0, (triton.cdiv(chunks, RUN) - 1).bit_length())
        block_d = min(32, triton.next_power_of_2(head_dim))
        combine_kernel[(batch * heads_q * tokens, triton.cdiv(head_dim, block_d))](
            out_rows, cache_len, partial, lse, **sizes, **constants, RUN=RUN, LOG_RUNS=log_runs, BLOCK_D=block_d,
            STAGES=max(3, min(16, 256 >> log_runs)), num_warps=4,
        )  # fmt: skip
    return out


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of the T newest tokens of each row over a KV cache of fixed size. Not differentiable.

    Args:
        q: `[B, H_q, T, D]` in bfloat16, float16 or float32; any strides, the last dimension contiguous.
        k_cache, v_cache: `[B, H_kv, S, D]` in q's dtype, or int8 with scales; likewise. Query head h reads KV head
            `h // (H_q // H_kv)`. Slots past `cache_len` may hold anything, NaN included.
        cache_len: int32 `[B]` on the device: valid tokens of each row, the T new ones included. Query t stands at
            position `p = cache_len[b] - T + t` and sees keys `j <= p`. It is never read by the host.
        window: number of keys a query sees, itself included: `j > p - window`.
        scale: positive factor on the scores, `1 / sqrt(D)` when None.
        k_scale, v_scale: fp32 `[B, H_kv, S]` for int8 caches: the key is `k_cache * k_scale`, one scale for each token
            and KV head.

    Returns `[B, H_q, T, D]` in q's dtype; a query that sees no key gives 0.

    A row's bits depend on its query and on the keys it sees, not on B, T, S or other rows.
    In a captured CUDA graph it is right at every length. Call it once with the same shapes before the capture, and
    do not replay two graphs that contain it at the same time.
    Raises ValueError, with what would fit, for shapes, dtypes or options that do not.
    """
    _check(q, k_cache, v_cache, cache_len, window, scale, k_scale, v_scale)
    options = dict(window=window, scale=scale, k_scale=k_scale, v_scale=v_scale)
    if q.device.type == "cuda":
        reason = why_not_triton(q.device.index, q.shape[3], q.dtype)
        if reason is None:
            q, k_cache, v_cache = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k_cache, v_cache))
            with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
                return launch(q, k_cache, v_cache, cache_len, **options)
        _announce(reason)
    return reference.flash_decode(q, k_cache, v_cache, cache_len, **options)


@cache
def why_not_triton(index: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run on this GPU, or None."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is for tensors on the CPU"
    if dtype not in DTYPES:
        return f"{dtype} is not one of bfloat16, float16, float32"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim {head_dim} is outside {MIN_HEAD_DIM} .. {MAX_HEAD_DIM}"
    capability = torch.cuda.get_device_capability(index)
    return None if capability >= (8, 0) else f"compute capability {capability[0]}.{capability[1]} is below 8.0"


@cache
def _announce(reason: str) -> None:
    warnings.warn(f"flash_decode falls back to plain PyTorch, which reads the whole cache: {reason}", stacklevel=3)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    window: int | None,
    scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    def refuse(sentence: str) -> None:
        raise ValueError(f"flash_decode: {sentence}")

    if not (q.dim() == k_cache.dim() == 4 and k_cache.shape == v_cache.shape):
        shapes = f"{tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        refuse(f"q must be [B, H_q, T, D] and both caches [B, H_kv, S, D]; got {shapes}")
    batch, heads_q, _, head_dim = q.shape
    heads_kv = k_cache.shape[1]
    if k_cache.shape[0] != batch or k_cache.shape[3] != head_dim:
        refuse(f"the caches must be [{batch}, heads, slots, {head_dim}] to fit q; got {tuple(k_cache.shape)}")
    if heads_kv == 0 or heads_q % heads_kv != 0:
        fits = [h for h in range(1, heads_q + 1) if heads_q % h == 0]
        refuse(f"{heads_q} query heads cannot share {heads_kv} KV heads; {fits} would fit")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        refuse("the last dimension of the caches must be contiguous")
    if cache_len.shape != (batch,) or cache_len.dtype != torch.int32 or not cache_len.is_contiguous():
        refuse(f"cache_len must be int32 [{batch}], contiguous; got {cache_len.dtype} {tuple(cache_len.shape)}")
    quantized = k_cache.dtype == torch.int8
    if k_cache.dtype != v_cache.dtype or not (quantized or k_cache.dtype == q.dtype) or not q.is_floating_point():
        refuse(f"the caches must both be {q.dtype} like q, or int8; got {k_cache.dtype} and {v_cache.dtype}")
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (given is None) == quantized:
            refuse(f"{name} goes with int8 caches, and int8 caches need it; the caches are {k_cache.dtype}")
        if given is not None and (given.shape != k_cache.shape[:3] or given.dtype != torch.float32):
            got = f"{given.dtype} {tuple(given.shape)}"
            refuse(f"{name} must be float32 {list(k_cache.shape[:3])}, one for each token and KV head; got {got}")
        if given is not None and given.stride(-1) != 1:
            refuse(f"the last dimension of {name} must be contiguous")
    for given in (k_cache, v_cache, cache_len, k_scale, v_scale):
        if given is not None and given.device != q.device:
            refuse(f"all tensors must be on {q.device} like q; one is on {given.device}")
    if scale is not None and not 0.0 < scale < math.inf:
        refuse(f"scale must be a positive number, or None for 1 / sqrt(head_dim); got {scale}")
    if window is not None and window < 1:
        refuse(f"window={window} must be at least 1 key (the query itself)")
