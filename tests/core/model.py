"""The content model: an executor whose K/V memory remembers *what* was written where.

A slot holds the prefix that a real model would have computed it from: an interned number for
"token t after prefix p". A step first writes all its rows and then checks every read, so a wrong
block table, a block freed too early, a false prefix hit, a copy made too late or a swap that lost
a page is found at the first step that would have attended to it.

The tokens it returns depend on (request seed, position) only, so no output may depend on how the
requests were scheduled. `expected()` says what they must be: a loop of ten lines.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from engine.core import Batch, Request, RowFailed, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Script:
    """What becomes of a request; kept in `Request.user`. Positions count the prompt too."""

    seed: int = 0
    stop_string_at: int | None = None  # the token at this position completes a stop string
    fails_at: int | None = None  # the row that should bring this position's token fails alone

    def token(self, position: int) -> int:
        """0 or 1, and a 2 (which the walk uses as eos) about once in ten tokens."""
        mixed = (self.seed * 0x9E3779B1 + position * 0x85EBCA77 + 12345) & 0xFFFFFFFF
        mixed = ((mixed ^ mixed >> 15) * 0x2C1B3C6D) & 0xFFFFFFFF
        mixed ^= mixed >> 13
        return 2 if mixed % 10 == 0 else mixed >> 8 & 1


def expected(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """The request's whole output and its finish reason if nobody aborts it and no step fails."""
    script, params, known = request.user or Script(), request.params, request.num_prompt
    limit = max_model_len if params.max_tokens is None else min(
        known + params.max_tokens, max_model_len)
    output: list[int] = []
    while True:
        if known == script.fails_at:
            return output, "error"
        token = script.token(known)
        output.append(token)
        known += 1
        if known - 1 == script.stop_string_at:
            return output, "stop"
        if token in request.stop_ids and len(output) >= params.min_tokens:
            return output, "stop"
        if known >= limit:
            return output, "length"


class WrongRead(AssertionError):
    """A position read through a block table does not hold the K/V of the request's prefix."""


class ContentModel:
    """Device and CPU blocks of `config`, and an executor over them.

    `execute` must be called once for each batch, in the order of their schedule() calls and before
    the next one (a device runs its queue in order, and reads the tables as they were queued).
    """

    def __init__(self, config: SchedulerConfig):
        self.size = config.block_size
        self.device: list[list[Any]] = [[None] * self.size for _ in range(config.num_blocks)]
        self.cpu: list[list[Any]] = [[None] * self.size for _ in range(config.num_cpu_blocks)]
        self.reads = 0  # slots checked so far
        self._nodes: dict[Hashable, int] = {}  # (prefix, token) -> number
        self._streams: dict[Request, list[int]] = {}  # token ids the device knows, in order
        self._prefixes: dict[Request, list[int]] = {}  # what each position must hold
        self._failed: set[Request] = set()  # a row of theirs failed; one more may be in flight
        self._content_of: dict[Hashable, tuple[int, ...]] = {}  # key -> what its block holds
        self._key_of: dict[tuple[int, ...], Hashable] = {}

    def execute(self, batch: Batch) -> list[int | None | RowFailed]:
        """Run the step; its results, one entry a row. WrongRead on the first wrong read."""
        for source, target in batch.swap_outs:
            self.cpu[target] = list(self.device[source])
        for source, target in batch.copies:
            self.device[target] = list(self.device[source])
        for source, target in batch.swap_ins:
            self.device[target] = list(self.cpu[source])
        for row in batch.rows:
            prefixes = self._prefix(row.request, row.start + row.num_tokens)
            for position in range(row.start, row.start + row.num_tokens):
                block = row.request.block_table[position // self.size]
                self.device[block][position % self.size] = prefixes[position]
        results: list[int | None | RowFailed] = []
        for row in batch.rows:
            if row.request not in self._failed:
                self._check_reads(row.request, row.start + row.num_tokens)
            results.append(self._sample(row.request, row.start + row.num_tokens)
                           if row.samples else None)
        return results

    def ruin(self, batch: Batch) -> None:
        """A step that raised half way: everything it was allowed to write holds rubbish."""
        for _, target in batch.swap_outs:
            self.cpu[target] = ["rubbish"] * self.size
        for _, target in batch.copies + batch.swap_ins:
            self.device[target] = ["rubbish"] * self.size
        for row in batch.rows:
            for position in range(row.start, row.start + row.num_tokens):
                block = row.request.block_table[position // self.size]
                self.device[block][position % self.size] = "rubbish"

    def check_index(self, keys: dict[int, Hashable]) -> None:
        """Every indexed block holds whole content; one key, one content, and the other way round.

        `keys` is BlockPool.keys. Not while a batch is scheduled but not executed. Keys that are
        negative numbers are passed over: they belong to one simulated request, who will check its
        own reads; when its step fails after it was preempted, rubbish stays under them, harmless.
        """
        for block, key in keys.items():
            if isinstance(key, int) and key < 0:
                continue
            content = tuple(self.device[block])
            hashed = isinstance(key, bytes)  # then equal content must have equal keys, too
            if self._content_of.setdefault(key, content) != content or None in content \
                    or hashed and self._key_of.setdefault(content, key) != key:
                raise WrongRead(f"block {block} is indexed as {key!r}, but holds {content}")

    # ------------------------------------------------------------------ what must be where
    def _check_reads(self, request: Request, end: int) -> None:
        must = self._prefix(request, end)
        table, size, device = request.block_table, self.size, self.device
        self.reads += end
        for position in range(end):
            if device[table[position // size]][position % size] != must[position]:
                raise WrongRead(
                    f"{request.id} reads position {position} in block {table[position // size]}: "
                    f"it holds {device[table[position // size]][position % size]}, "
                    f"not {must[position]}; table {table}")

    def _sample(self, request: Request, position: int) -> int | RowFailed:
        script = request.user or Script()
        if position == script.fails_at or request in self._failed:
            self._failed.add(request)
            return RowFailed("NaN in the logits")
        stream = self._streams.get(request)
        token = script.token(position)
        if stream is not None:
            if position > len(stream):
                raise WrongRead(f"{request.id} samples position {position} of {len(stream)} known")
            if position == len(stream):
                stream.append(token)
        return token

    def _prefix(self, request: Request, end: int) -> list[Any]:
        """The content of positions [0, end), interned."""
        if request in self._failed:
            return ["rubbish"] * end
        if request.tokens is None:
            return self._prefix_without_ids(request, end)
        stream = self._streams.get(request)
        if stream is None:
            stream = self._streams[request] = list(request.tokens)
            self._prefixes[request] = []
        if stream[:len(request.tokens)] != request.tokens or end > len(stream):
            raise WrongRead(f"{request.id} computes up to {end} of {stream}, "
                            f"the scheduler knows {request.tokens}")
        prefixes = self._prefixes[request]
        while len(prefixes) < end:
            before = prefixes[-1] if prefixes else f"salt {request.cache_salt}"
            prefixes.append(self._intern((before, stream[len(prefixes)])))
        return prefixes

    def _prefix_without_ids(self, request: Request, end: int) -> list[int]:
        prefixes = self._prefixes.setdefault(request, [])
        given = (request.own_keys or ())[:request.num_prompt // self.size]
        while len(prefixes) < end:
            index, slot = divmod(len(prefixes), self.size)
            owner = request
            while owner.parent is not None and len(prefixes) < request.num_prompt:
                owner = owner.parent  # the samples of one prompt have one content
            prefixes.append(self._intern(("given", given[index], slot) if index < len(given)
                                         else (id(owner), len(prefixes))))
        return prefixes

    def _intern(self, what: Hashable) -> int:
        return self._nodes.setdefault(what, len(self._nodes))
