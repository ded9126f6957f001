"""The four small steps around the model in a round of decoding, with every position read from memory.

A round takes T = k + 1 tokens of each row through the model: the newest one, whose position is known, and k drafts of
what may follow. They are verified by what the model chooses after each of them:

    gather   row b:  [newest, draft 1 .. draft k] -> their embeddings, where they stand, how far attention may look
    (model and sampler: the token chosen after each of the T)
    accept           draft j stands while it is what was chosen after the tokens before it; the choice after the last
                     one that stands is new too. 1 to T tokens are written behind the newest; the position moves on.
    look_up          the newest earlier place where the row said its last 4, 3 or 2 tokens before, for the next drafts
    publish          the log into a ring in the host's memory, for the host to read while later rounds run

As PyTorch operations these are some thirty launches, more than a small model's whole layer costs; here they are four.
A GPU stores into the host's memory itself: a copy between two graphs, and events that take the time, would hold the
second graph up for some twenty microseconds.

No host value enters but shapes, so that a captured CUDA graph replays them at any position. A row with position >=
limit has ended: it is moved by nothing, and writes nothing into the cache.

Arguments named alike everywhere:
    tokens    int32 [B, L]     every row's text so far; what stands behind `position` means nothing
    position  int32 [B]        index of the newest token
    limit     int32 [B]        last index at which a token may stand
    drafts    int32 [B, K]     draft 1 .. K of what follows; -1 is no draft and never stands
    turns     positions, see `flash_decode_plan.turning_points`: a round that begins before one adds no token that was
              chosen behind it, since a round that begins there would add up attention in another order
    log       int32 [B, 2 + K + 1]  what the host reads: tokens added, match (below), the tokens chosen after each of T
    match     one integer, 0 for none: the length n of the match in the bits from 28 on, below them the index of the
              token that followed it. Larger is better: a longer match, then a newer one.
"""

import time

import numpy as np
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import globaltimer

    from kernels.overlap import launch_options, wait_for_the_kernel_before
except ImportError:  # no Triton for this system: the plain functions do the work
    triton = None

NOWHERE = -(2**30)  # the position of a row that has ended: below 0 nothing is written, whatever is added to it
LONGEST_MATCH = 4
INDEX_BITS = 28
INDEX = tl.constexpr((1 << INDEX_BITS) - 1) if triton else (1 << INDEX_BITS) - 1
LOOK_UP_BLOCK = 1024


def gather(
    tokens: Tensor,
    position: Tensor,
    limit: Tensor,
    drafts: Tensor,
    seeds: Tensor,
    embed: Tensor,
    width: int,
    *,
    first: int = 0,
    shift: Tensor | None = None,
    match: Tensor | None = None,
    stamp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the model reads in a round: `width` tokens of each row, the first of them at position + first + shift.

    Positions up to `position` are read from `tokens`, later ones from `drafts`; none is below 0.

    Args:
        seeds: int64 [B], the rows' seeds.
        embed: [V, C], the embedding.
        first, shift: 0 is the newest token; shift is an int32 [1] in memory, for the part a graph may not fix.
        match: int32 [B]: fill `drafts` from there first. Past its end a match repeats: text of period n goes on so.
        stamp: int64 [1 or more]: the time in nanoseconds is written into the first.

    Returns:
        x [B * width, C], the embeddings (an absent draft reads row 0),
        start int32 [B], the position of the first token, far below 0 for a row that has ended,
        lengths int32 [B], tokens that attention may see, these included: start + width, 0 for a row that has ended,
        seeds and positions int64 [B * width]: of the noise for the token chosen after each.
    """
    if tokens.is_cuda and triton is not None:
        return launch_gather(tokens, position, limit, drafts, seeds, embed, width, first, shift, match, stamp)
    if stamp is not None:
        stamp[0] = time.perf_counter_ns()
    live = position < limit
    if match is not None:
        index = (match & int(INDEX)).long()
        period = (position + 1 - index).clamp(min=1)
        source = index[:, None] + torch.arange(width - 1, device=tokens.device) % period[:, None]
        found = tokens.gather(1, source.clamp(max=tokens.shape[1] - 1))
        drafts[:, : width - 1] = torch.where(match[:, None] > 0, found, -1)
    offset = first if shift is None else first + shift
    places = (position + offset).clamp(min=0)[:, None] + torch.arange(width, device=tokens.device)  # [B, T]
    known = tokens.gather(1, places.minimum(position[:, None]).long())
    guess = (places - position[:, None] - 1).clamp(0, drafts.shape[1] - 1).long()
    ids = torch.where(places <= position[:, None], known, drafts.gather(1, guess))
    start = torch.where(live, places[:, 0], NOWHERE).int()
    return (
        embed[ids.clamp(min=0).flatten()],
        start,
        (start + width).clamp(min=0).int(),
        seeds.repeat_interleave(width),
        (places + 1).flatten().long(),
    )


def accept(
    tokens: Tensor,
    position: Tensor,
    limit: Tensor,
    drafts: Tensor,
    chosen: Tensor,
    log: Tensor,
    turns: tuple[int, ...],
) -> None:
    """Verify the drafts against `chosen` int64 [B, T], write the new tokens, move `position`, fill `log`."""
    if tokens.is_cuda and triton is not None:
        return launch_accept(tokens, position, limit, drafts, chosen, log, turns)
    width = chosen.shape[1]
    stands = (drafts[:, : width - 1] == chosen[:, :-1]).int().cumprod(1)
    live = position < limit
    room = limit - position
    for turn in turns:
        room = torch.where(position < turn, room.clamp(max=turn - position), room)
    added = torch.where(live, (stands.sum(1) + 1).minimum(room), 0).int()
    places = position[:, None] + 1 + torch.arange(width, device=tokens.device)
    old = tokens.gather(1, places)
    tokens.scatter_(1, places, torch.where(live[:, None], chosen.int(), old))
    position += added
    log[:, 0], log[:, 1], log[:, 2 : 2 + width] = added, 0, chosen.int()


def look_up(tokens: Tensor, position: Tensor, log: Tensor) -> None:
    """Put into log[:, 1] the match of each row's last tokens with its earlier ones; it must be 0 before."""
    if tokens.is_cuda and triton is not None:
        return launch_look_up(tokens, position, log)
    for row, newest in enumerate(position.tolist()):
        text = tokens[row, : newest + 1].cpu().numpy()
        ends, length = np.arange(newest), 0  # places where a match may end; how long all of these are
        while length < LONGEST_MATCH and len(longer := extended(text, ends, length)):
            ends, length = longer, length + 1
        log[row, 1] = (length << INDEX_BITS | int(ends[-1]) + 1) if length >= 2 else 0


def extended(text: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """Those of `ends` whose last length + 1 tokens are the text's, given that their last `length` are."""
    ends = ends[ends >= length]
    return ends[text[ends - length] == text[-1 - length]] if length < len(text) else ends[:0]


def publish(log: Tensor, logprobs: Tensor | None, stamps: Tensor, place: Tensor, ring: tuple[Tensor, Tensor, Tensor]):
    """Put what a round did into the next place of the host's ring.

    Args:
        log, logprobs: as above, and fp32 [B, K + 1] or None.
        stamps: int64 [3, 2], the first column: when three parts of the round began, in nanoseconds. (The second is
            room: each of them begins at 16 bytes, so that `gather` is compiled once for all.)
        place: int32 [1], the index into the ring; it moves on.
        ring: R places of log and logprobs, and int64 [R, 4]: the three stamps, and the time of this.
    """
    if log.is_cuda and triton is not None:
        return launch_publish(log, logprobs, stamps, place, ring)
    index = place.item()
    its_log, its_logprobs, times = (x[index] for x in ring)
    its_log.copy_(log)
    if logprobs is not None:
        its_logprobs.copy_(logprobs)
    times[:3], times[3] = stamps[:, 0], time.perf_counter_ns()
    place.fill_((index + 1) % len(ring[0]))


if triton is not None:
    # Arguments for which a kernel must not be compiled anew because one is 1 or a multiple of 16.
    SIZES = ["stride_tokens", "stride_drafts", "stride_match", "width", "first"]

    @triton.jit(do_not_specialize=SIZES)
    def gather_kernel(
        tokens, position, limit, drafts, seeds, embed, shift, match, x, start, lengths, out_seeds, out_positions, stamp,
        stride_tokens, stride_drafts, stride_match, width, first, C, NOWHERE: tl.constexpr, BLOCK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Program (b, t): token t of row b."""
        wait_for_the_kernel_before(OVERLAP)
        row, t = tl.program_id(0), tl.program_id(1)
        if stamp is not None:
            tl.store(stamp, globaltimer(), mask=(row == 0) & (t == 0))
        newest = tl.load(position + row)
        begin = newest + first
        if shift is not None:
            begin += tl.load(shift)
        begin = tl.maximum(begin, 0)
        place = begin + t
        if place <= newest:
            token = tl.load(tokens + row.to(tl.int64) * stride_tokens + place)
        else:
            guess = place - newest - 1
            if match is not None:
                found = tl.load(match + row * stride_match)
                index = found & INDEX
                source = index + guess % tl.maximum(newest + 1 - index, 1)
                token = tl.load(tokens + row.to(tl.int64) * stride_tokens + source, mask=found > 0, other=-1)
                tl.store(drafts + row * stride_drafts + guess, token)
            else:
                token = tl.load(drafts + row * stride_drafts + guess)
        out = row * width + t
        tl.store(out_seeds + out, tl.load(seeds + row))
        tl.store(out_positions + out, (place + 1).to(tl.int64))
        if t == 0:
            live = newest < tl.load(limit + row)
            tl.store(start + row, tl.where(live, begin, NOWHERE))
            tl.store(lengths + row, tl.where(live, begin + width, 0))
        source_row = embed + tl.maximum(token, 0).to(tl.int64) * C
        for c in range(0, C, BLOCK):
            column = c + tl.arange(0, BLOCK)
            tl.store(x + out * C + column, tl.load(source_row + column, mask=column < C), mask=column < C)

    @triton.jit(do_not_specialize=["stride_tokens", "stride_drafts", "stride_log"])
    def accept_kernel(
        tokens, position, limit, drafts, chosen, log, stride_tokens, stride_drafts, stride_log, turns,
        WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Program b: row b."""
        wait_for_the_kernel_before(OVERLAP)
        row = tl.program_id(0)
        newest, last = tl.load(position + row), tl.load(limit + row)
        live = newest < last
        added, stands = 0, 1
        for t in tl.static_range(WIDTH):
            token = tl.load(chosen + row * WIDTH + t).to(tl.int32)
            tl.store(tokens + row.to(tl.int64) * stride_tokens + newest + 1 + t, token, mask=live)
            tl.store(log + row * stride_log + 2 + t, token)
            added += stands
            if t < WIDTH - 1:
                stands = stands & (tl.load(drafts + row * stride_drafts + t) == token).to(tl.int32)
        room = last - newest
        for i in tl.static_range(len(turns)):
            room = tl.minimum(room, tl.where(newest < turns[i], turns[i] - newest, room))
        added = tl.where(live, tl.minimum(added, room), 0)
        tl.store(position + row, newest + added)
        tl.store(log + row * stride_log, added)
        tl.store(log + row * stride_log + 1, 0)

    @triton.jit(do_not_specialize=["stride_tokens", "stride_log"])
    def look_up_kernel(
        tokens, position, log, stride_tokens, stride_log, LONGEST: tl.constexpr, INDEX_BITS: tl.constexpr,
        BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Program (b, i): matches that end in block i of row b. The maximum over programs is the row's."""
        wait_for_the_kernel_before(OVERLAP)
        row, block = tl.program_id(0), tl.program_id(1)
        newest = tl.load(position + row)
        if block * BLOCK < newest:
            text = tokens + row.to(tl.int64) * stride_tokens
            end = block * BLOCK + tl.arange(0, BLOCK)
            alike = end < newest
            matched = tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(LONGEST):
                last = tl.load(text + tl.maximum(newest - back, 0))
                alike = alike & (end >= back)
                alike = alike & (tl.load(text + end - back, mask=alike, other=-1) == last)
                matched += alike.to(tl.int32)
            best = tl.max(tl.where(matched >= 2, (matched << INDEX_BITS) | (end + 1), 0), 0)
            if best > 0:
                tl.atomic_max(log + row * stride_log + 1, best)

    @triton.jit(do_not_specialize=["log_size", "logprobs_size"])
    def publish_kernel(
        log, logprobs, stamps, place, ring_log, ring_logprobs, ring_times, log_size, logprobs_size,
        PLACES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program."""
        wait_for_the_kernel_before(OVERLAP)
        index = tl.load(place)
        for start in range(0, log_size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(ring_log + index * log_size + i, tl.load(log + i, mask=i < log_size), mask=i < log_size)
        if logprobs is not None:
            for start in range(0, logprobs_size, BLOCK):
                i = start + tl.arange(0, BLOCK)
                values = tl.load(logprobs + i, mask=i < logprobs_size)
                tl.store(ring_logprobs + index * logprobs_size + i, values, mask=i < logprobs_size)
        for i in tl.static_range(3):
            tl.store(ring_times + index * 4 + i, tl.load(stamps + 2 * i))
        tl.store(ring_times + index * 4 + 3, globaltimer())
        tl.debug_barrier()  # every warp has read it
        tl.store(place, (index + 1) % PLACES)

    def launch_gather(tokens, position, limit, drafts, seeds, embed, width, first, shift, match, stamp=None):
        batch, channels = len(tokens), embed.shape[1]
        x = embed.new_empty(batch * width, channels)
        start, lengths = torch.empty_like(position), torch.empty_like(position)
        out_seeds, out_positions = (seeds.new_empty(batch * width) for _ in range(2))
        gather_kernel[(batch, width)](
            tokens, position, limit, drafts, seeds, embed, shift, match, x, start, lengths, out_seeds, out_positions,
            stamp, tokens.stride(0), drafts.stride(0), 0 if match is None else match.stride(0), width, first, channels,
            NOWHERE=NOWHERE, BLOCK=min(4096, triton.next_power_of_2(channels)), num_warps=8,
            **launch_options(tokens.device),
        )  # fmt: skip
        return x, start, lengths, out_seeds, out_positions

    def launch_accept(tokens, position, limit, drafts, chosen, log, turns):
        accept_kernel[(len(tokens),)](
            tokens, position, limit, drafts, chosen.contiguous(), log, tokens.stride(0), drafts.stride(0),
            log.stride(0), turns, WIDTH=chosen.shape[1], num_warps=1, **launch_options(tokens.device),
        )  # fmt: skip

    def launch_look_up(tokens, position, log):
        batch, slots = tokens.shape
        look_up_kernel[(batch, triton.cdiv(slots, LOOK_UP_BLOCK))](
            tokens, position, log, tokens.stride(0), log.stride(0), LONGEST=LONGEST_MATCH, INDEX_BITS=INDEX_BITS,
            BLOCK=LOOK_UP_BLOCK, num_warps=4, **launch_options(tokens.device),
        )  # fmt: skip

    def launch_publish(log, logprobs, stamps, place, ring):
        logprobs_size = 0 if logprobs is None else logprobs.numel()
        publish_kernel[(1,)](
            log, logprobs, stamps, place, *ring, log.numel(), logprobs_size, PLACES=len(ring[0]), BLOCK=128,
            num_warps=1, **launch_options(log.device),
        )  # fmt: skip
