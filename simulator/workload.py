"""What arrives when: columns of times and lengths, made by a generator or read from a trace."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from simulator.errors import WorkloadError
from simulator.lengths import LONGEST_LENGTH, Draw
from simulator.words import spell

if TYPE_CHECKING:
    from simulator.chats import Chats

LONGEST = 1e9  # seconds of a workload: float64 still counts 0.1 us then
MOST_REQUESTS = 100_000_000  # their columns alone take 2.4 GB

# Keys of the full prompt blocks of request `index` for an engine with `block_size`.
BlockKeys = Callable[[int, int], Sequence[int]]


@dataclass(slots=True)
class Workload:
    """Requests in order of arrival. Columns, because a day of traffic has millions of them."""

    name: str
    at: array  # 'd': seconds, not decreasing
    prompts: array  # 'q': prompt tokens, >= 1
    outputs: array  # 'q': output tokens, >= 1
    keys: BlockKeys | None = None  # None: no request shares content with another
    tokens: Callable[[int], list[int]] | None = None  # token ids of request `index`, before keys
    closed: Closed | None = None  # set: `at` is ignored, users send one after another
    chats: Chats | None = None  # set: `at` counts for first turns only
    notes: list[str] = field(default_factory=list)  # what reading it changed, for the user

    def __post_init__(self) -> None:
        if not self.span <= LONGEST:  # or not a number: inf - inf
            raise WorkloadError(
                f"{self.name}: the last of {len(self):,} requests would arrive "
                f"after {self.at[-1]:.3g} s, and beyond {spell(LONGEST)} no clock tells "
                f"their milliseconds: raise the rate, or ask for fewer requests")

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def waits(self) -> bool:
        """Whether arrivals depend on answers."""
        return self.closed is not None or self.chats is not None

    @property
    def span(self) -> float:
        """Seconds between the first and the last arrival."""
        return self.at[-1] - self.at[0] if self.at else 0.0

    @property
    def rate(self) -> float:
        """Mean arrivals a second; 0 when all come at once."""
        return (len(self) - 1) / self.span if self.span > 0 else 0.0

    def first(self, count: int) -> Workload:
        """The first `count` requests (all of them when there are fewer)."""
        if count < 1:
            raise WorkloadError(f"the number of requests is {count}, must be at least 1")
        if self.chats is not None and count < len(self):
            raise WorkloadError("a chat workload is not cut: ask for fewer conversations")
        return replace(self, at=self.at[:count], prompts=self.prompts[:count],
                       outputs=self.outputs[:count], notes=list(self.notes))

    def window(self, start: int, count: int) -> Workload:
        """Requests start … start + count - 1 as a workload of their own that begins at 0.
        WorkloadError unless all of them are there."""
        if self.waits or start < 0 or count < 1 or start + count > len(self):
            raise WorkloadError(f"requests {start} to {start + count - 1} of {self.name} are no "
                                f"window of a trace of {len(self):,}")
        end, keys, tokens = start + count, self.keys, self.tokens
        return replace(
            self, at=array("d", (time - self.at[start] for time in self.at[start:end])),
            prompts=self.prompts[start:end], outputs=self.outputs[start:end], notes=[],
            keys=None if keys is None else lambda index, size: keys(start + index, size),
            tokens=None if tokens is None else lambda index: tokens(start + index))

    def sample(self, share: float, seed: int = 0) -> Workload:
        """Each request kept with probability `share`, at its own time: a thinner stream."""
        if self.waits or not 0 < share <= 1:
            raise WorkloadError(f"{self.name}: --sample {share:g} must be above 0 and at most 1, "
                                f"of arrivals that do not depend on answers")
        draw = Random(f"{seed}:sample")
        kept = array("q", (index for index in range(len(self)) if draw.random() < share))
        if not kept:
            raise WorkloadError(f"{self.name}: --sample {share:g} of {len(self):,} requests left "
                                f"none: take more")
        at, prompts, outputs = (array(column.typecode, (column[index] for index in kept))
                                for column in (self.at, self.prompts, self.outputs))
        keys, tokens = self.keys, self.tokens
        return replace(self, at=at, prompts=prompts, outputs=outputs, notes=list(self.notes),
                       keys=None if keys is None else lambda index, size: keys(kept[index], size),
                       tokens=None if tokens is None else lambda index: tokens(kept[index]))

    def faster(self, factor: float) -> Workload:
        """The same requests at `factor` times the rate."""
        if not 0 < factor < float("inf"):
            raise WorkloadError(f"the rate factor is {factor:g}, must be above 0")
        start = self.at[0] if self.at else 0.0
        at = array("d", (start + (t - start) / factor for t in self.at))
        return replace(self, at=at, notes=list(self.notes))


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: `users` people send, wait for the answer, think, and send again."""

    users: int
    think: Callable[[Random], float]  # seconds from an answer to the same user's next request
    seed: int


def fixed_list(requests: Iterable[tuple[float, int, int]], name: str = "list") -> Workload:
    """From (arrival seconds, prompt tokens, output tokens) triples; sorted by arrival, stably.

    WorkloadError names the first triple that is not possible.
    """
    rows = list(requests)
    if not rows:
        raise WorkloadError("a workload needs at least one request")
    for index, (at, prompt, output) in enumerate(rows):
        if not (0 <= at < float("inf")) or not all(1 <= length <= LONGEST_LENGTH
                                                   for length in (prompt, output)):
            raise WorkloadError(f"request {index} is ({at:g} s, prompt {prompt}, output {output}): "
                                f"the time must be at least 0, the lengths from 1 to "
                                f"{LONGEST_LENGTH:,}")
    rows.sort(key=lambda row: row[0])
    return Workload(name, array("d", (row[0] for row in rows)),
                    array("q", (row[1] for row in rows)), array("q", (row[2] for row in rows)))


def poisson(rate: float, count: int, inputs: Draw, outputs: Draw, *, seed: int = 0,
            burstiness: float = 1.0) -> Workload:
    """`count` requests with independent gaps of mean 1 / rate.

    burstiness 1 is a Poisson process (exponential gaps, never truncated); below 1 gaps are gamma
    with that shape and burstier, above 1 more regular: `vllm bench serve`'s meaning. rate inf: all
    at time 0. The streams of gaps, inputs and outputs have seeds of their own, so changing a
    length distribution does not move an arrival.
    """
    _check_generator(rate, count, burstiness)
    gaps = Random(f"{seed}:arrivals")
    at, now = array("d"), 0.0
    for _ in range(count):
        if rate * burstiness != float("inf"):
            now += (gaps.expovariate(rate) if burstiness == 1.0
                    else gaps.gammavariate(burstiness, 1 / (rate * burstiness)))
        at.append(now)
    kind = "poisson" if burstiness == 1.0 else f"gamma({burstiness:g})"
    prompts, answers = _draw_lengths(count, inputs, outputs, seed)
    return Workload(f"{kind} {rate:g}/s", at, prompts, answers)


def closed_loop(users: int, count: int, inputs: Draw, outputs: Draw, *, think: float = 0.0,
                seed: int = 0) -> Workload:
    """`count` requests from `users` who each wait for their answer, then think (exponential)."""
    _check_generator(1.0, count, 1.0)
    if not 1 <= users <= MOST_REQUESTS or not 0 <= think * count <= LONGEST:
        raise WorkloadError(f"a closed loop needs from 1 to {MOST_REQUESTS:,} users and a think "
                            f"time of at least 0, with {count:,} requests at most "
                            f"{LONGEST / count:g} s, got {users} and {think:g}")
    prompts, answers = _draw_lengths(count, inputs, outputs, seed)
    draw = (lambda rng: rng.expovariate(1 / think)) if think else (lambda rng: 0.0)
    return Workload(f"closed loop of {users}", array("d", bytes(8 * count)), prompts, answers,
                    closed=Closed(users, draw, seed))


def _draw_lengths(count: int, inputs: Draw, outputs: Draw, seed: int) -> tuple[array, array]:
    rng_in, rng_out = Random(f"{seed}:inputs"), Random(f"{seed}:outputs")
    return (array("q", (inputs(rng_in) for _ in range(count))),
            array("q", (outputs(rng_out) for _ in range(count))))


def _check_generator(rate: float, count: int, burstiness: float) -> None:
    if not rate > 0:
        raise WorkloadError(f"the rate is {rate:g} requests a second, must be above 0")
    if not 1 <= count <= MOST_REQUESTS:
        raise WorkloadError(f"the number of requests is {count}, must be from 1 to "
                            f"{MOST_REQUESTS:,}")
    if not 1e-6 <= burstiness <= 1e6:
        raise WorkloadError(f"the burstiness is {burstiness:g}, must be from 1e-06 to 1e+06")
