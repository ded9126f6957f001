"""How many tokens to draft, and what drafting brought.

Speculation never changes the text (rounds.py), so the only question is speed. A round with k drafts adds

    1 + a_1 + a_1 a_2 + ... + a_1 .. a_k   tokens,  a_j: how often draft j stands where those before it did

and takes the time t(k). Both are measured as generation goes on, and `AdaptiveDrafts` takes the k of most tokens per
second, k = 0 among them. What it spends on finding out is bounded: rounds that added fewer tokens than plain decoding
would have in their time run up a debt, and while that is above a small part of the time so far, only k = 0 is taken.

Sources: Leviathan et al. 2023 (the arithmetic); Chen et al. 2023.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from rounds import Round

CHOICES = (0, 1, 3, 7, 15)  # with the newest token 2, 4, 8 and 16: kernels work in tiles of so many rows
DEBT = 0.02  # of the time so far: the most that drafting in vain may cost
ADVANTAGE = 1.03  # another k must promise so much more to be taken instead, and any k than plain decoding
LEARNING, DRIFT = 0.1, 0.04  # how fast a_j follows what is seen, and what is not seen
FALL, RISE, OUTLIER = 0.5, 0.1, 3  # how fast t(k) follows shorter and longer rounds; more than 3 t(k) counts as that
PLAIN_FIRST, PLAIN_EVERY = 3, 100  # rounds: t(0) is what all is compared with, and is kept up to date
MODEL = -1  # in place of a match's length: the drafts come from a smaller model
FIRST_GUESS = {2: 0.3, 3: 0.5, 4: 0.7, MODEL: 0.7}  # a_j before anything was measured, by where drafts come from


class AdaptiveDrafts:
    """Chooses k from what was measured: acceptance by source and position, and the time of a round by k."""

    def __init__(self, choices: Sequence[int] = CHOICES):
        self.choices = choices
        self.acceptance = {source: [guess] * max(choices) for source, guess in FIRST_GUESS.items()}
        self.restart()

    def tokens(self, drafts: int, source: int) -> float:
        """Tokens that a row is expected to gain in a round; source 0 has nothing to draft from."""
        total = stands = 1.0
        for a in self.acceptance[source][:drafts] if source else []:
            stands *= a
            total += stands
        return total

    def choose(self, sources: Sequence[int], room: int) -> int:
        """The k of the next round. sources: of each running row. room: k may not be larger."""
        if self.plain_rounds < PLAIN_FIRST or self.since_plain > PLAIN_EVERY or not any(sources):
            return 0
        plain = self.seconds[0]
        if self.debt > DEBT * self.elapsed + plain / 2:
            return 0

        def goodput(k):
            return sum(self.tokens(k, source) for source in sources) / self._time(k)

        # One step at a time: a k is tried when those below it have been.
        allowed = [k for k in self.choices if k <= room and all(j in self.seconds for j in self.choices if j < k)]
        best = max(allowed, key=goodput)
        for settled in (self.last, 0):
            if settled in allowed and goodput(best) < ADVANTAGE * goodput(settled):
                best = settled
        if best == 0 and len(allowed) > 1:
            # What was measured long ago may no longer hold: look again as often as it costs next to nothing.
            explore = allowed[1]
            if self.debt + self._time(explore) - plain < DEBT / 2 * self.elapsed:
                return explore
        self.last = best
        return best

    def _time(self, drafts):
        """t(k), or until it is known what the largest known one below it leads to expect; for the first, t(0)."""
        known = max(k for k in self.seconds if k <= drafts)
        slope = (self.seconds[known] - self.seconds[0]) / known if known else 0.0
        return self.seconds[known] + max(slope, 0.0) * (drafts - known)

    def restart(self):
        """Other rows, other times; what was learnt about acceptance stays."""
        self.seconds: dict[int, float] = {}  # t(k)
        self.elapsed = self.debt = 0.0
        self.plain_rounds = self.since_plain = self.last = 0

    def observe(self, done: Round, sources: Sequence[int], added: Sequence[int]):
        """Learn from a round. sources and added (tokens): of each row that was running."""
        k, seconds = done.drafts, done.seconds
        known = self.seconds.get(k, seconds)
        # An average that falls faster than it rises: what disturbs a round makes it longer.
        change = min(seconds, OUTLIER * known) - known
        self.seconds[k] = known + (FALL if change < 0 else RISE) * change
        self.elapsed += seconds
        self.plain_rounds, self.since_plain = self.plain_rounds + (k == 0), self.since_plain + 1 if k else 0
        if k == 0 or not added:
            return
        plain = self.seconds.get(0, seconds)
        gained = sum(added) / len(added) * plain
        self.debt = max(self.debt + seconds - gained, 0.0)
        for source, count in zip(sources, added, strict=True):
            if source:
                rates = self.acceptance[source]
                for j in range(min(k, count)):  # drafts 1 .. count - 1 stood, draft `count` did not
                    rates[j] += LEARNING * ((j < count - 1) - rates[j])
                # What was not tried becomes as likely as the last that was: so a larger k is tried again some day.
                for j in range(k, len(rates)):
                    rates[j] += DRIFT * (rates[k - 1] - rates[j])


class FixedDrafts:
    """The same k in every round, as far as there is room."""

    def __init__(self, drafts: int):
        self.drafts = drafts

    def choose(self, sources, room) -> int:
        return self.drafts if self.drafts <= room else 0

    def observe(self, done, sources, added):
        pass


class SpeculationStats:
    """What a call's rounds did, for the report."""

    def __init__(self):
        self.rounds = Counter()  # by k
        self.row_rounds = self.added = 0
        self.offered, self.accepted = defaultdict(int), defaultdict(int)  # drafts, by position 1, 2 ...
        self.draft_seconds = self.verify_seconds = 0.0
        self.plain_seconds, self.plain_rounds = 0.0, 0

    def observe(self, done: Round, sources: Sequence[int], added: Sequence[int]):
        """sources and added (tokens): of each row that was running."""
        self.rounds[done.drafts] += 1
        self.row_rounds += len(added)
        self.added += sum(added)
        self.draft_seconds += done.draft_seconds
        self.verify_seconds += done.seconds - done.draft_seconds
        if done.drafts == 0:
            self.plain_seconds, self.plain_rounds = self.plain_seconds + done.seconds, self.plain_rounds + 1
        for source, count in zip(sources, added, strict=True):
            for j in range(1, done.drafts + 1) if source else ():
                self.offered[j] += 1
                self.accepted[j] += j < count

    def summary(self) -> dict:
        """tokens_per_pass: that a row gained each time the model ran. acceptance: how often draft 1, 2 ... stood.
        speedup: over plain decoding at the speed of this call's own rounds without drafts; None if it had none."""
        speedup, rounds = None, sum(self.rounds.values())
        if self.plain_rounds and self.row_rounds:
            seconds = (self.draft_seconds + self.verify_seconds) / rounds
            speedup = self.added / self.row_rounds * self.plain_seconds / self.plain_rounds / seconds
        return {
            "tokens_per_pass": self.added / self.row_rounds if self.row_rounds else 0.0,
            "acceptance": [self.accepted[j] / self.offered[j] for j in sorted(self.offered)],
            "rounds_by_k": dict(sorted(self.rounds.items())),
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "speedup": speedup,
        }
