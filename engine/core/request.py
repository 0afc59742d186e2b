"""One request as the core sees it: which tokens are known, which are computed, when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import Any

from engine.core.errors import RequestError
from engine.core.params import SamplingParams as SamplingParams
from engine.core.params import shown


class RequestStatus(Enum):
    """Where a request is. FINISHED_* of other engines is FINISHED here, with a `finish_reason`."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


FINISH_REASONS = ("stop", "length", "abort", "error")


class StepClock:
    """How many steps a group of requests has made: `computed` of them scheduled, `tokens` of them
    committed. One step is one token of each member (see cohort.py)."""

    __slots__ = ("computed", "tokens")

    def __init__(self) -> None:
        self.computed = self.tokens = 0


NO_COHORT = StepClock()  # stands still, at 0


class Request:
    """The life of one sequence. The scheduler writes it; executors only read it.

    Two counters say everything about progress: `num_tokens`, the tokens known (prompt
    and output; while a step is in flight under look-ahead, also the one token it will bring), and
    `num_computed`, the tokens whose K/V is written, or is written by a step already scheduled.
    A step computes tokens [num_computed, end) with end <= num_tokens. Both are offsets from a
    clock, which moves all the members of a cohort at once; the clock of all others stands at 0, so
    `own_tokens` and `own_computed` are their counters, too, and quicker to read.

    A simulated request has a prompt *length* instead of token ids, and may carry `keys` (one per
    full prompt block, content-derived by whoever made the workload); it hashes nothing.
    """

    __slots__ = (
        "id", "seq", "params", "priority", "arrival_time", "deadline", "cache_salt", "parent",
        "children", "tokens", "keys", "own_keys", "num_prompt", "own_tokens", "own_computed",
        "clock", "number", "grows_at", "limit", "stop_ids", "status", "finish_reason", "error",
        "block_table", "cpu_table", "writable", "num_published", "num_hit", "num_received",
        "num_preemptions", "user",
    )

    def __init__(self, request_id: str, prompt: Sequence[int] | int, params: SamplingParams, *,
                 eos_ids: Sequence[int] = (), priority: int = 0, arrival_time: float = 0.0,
                 deadline: float | None = None, cache_salt: str | None = "",
                 keys: Sequence[Any] | None = None, parent: Request | None = None,
                 received: int = 0, user: Any = None):
        """`prompt` is the token ids, or just their number for a simulated request. K/V of its first
        `received` tokens was computed by another engine and comes with it. RequestError if the id
        is no string: refusals are told by it."""
        if not isinstance(request_id, str):
            raise RequestError(f"request id {shown(request_id)} must be a string")
        self.id = request_id
        self.seq = -1  # set once at intake: the place in line; ties of every policy end here
        self.params = params
        self.priority = priority  # smaller is sooner
        self.arrival_time = arrival_time  # seconds on the caller's clock
        self.deadline = deadline  # seconds on the same clock; the loop aborts what is past it
        self.cache_salt = "" if cache_salt is None else cache_salt
        self.parent = parent  # n > 1: the sample whose prompt blocks this one forks
        self.children: list[Request] = []
        self.tokens: list[int] | None = None if isinstance(prompt, int) else list(prompt)
        self.keys: list[Any] = []  # content key of each full block known so far, in order
        # Given keys of the prompt's full blocks; None: hash the tokens.
        self.own_keys = () if keys is None and isinstance(prompt, int) else keys
        self.num_prompt = prompt if isinstance(prompt, int) else len(prompt)
        self.own_tokens = self.num_prompt
        self.own_computed = 0
        self.clock = NO_COHORT
        self.number = 0  # in its cohort; 0: in none
        self.grows_at = 0  # reading of the clock at which it needs a block
        self.limit = 0  # num_tokens at which it ends by length; set once, by submit
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids))
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None  # one of FINISH_REASONS
        self.error: str | None = None  # the sentence that goes with finish_reason "error"
        self.block_table: list[int] = []  # append-only while running
        self.cpu_table: list[int] = []  # where the K/V lies while swapped
        self.writable = 0  # token slots in its blocks
        self.num_published = 0  # full blocks whose content is in the index
        self.num_hit = 0  # prompt tokens found in the prefix cache at first admission
        self.num_received = received  # prompt tokens whose K/V comes with it; 0 once it is lost
        self.num_preemptions = 0
        self.user = user  # the caller's own, never read here

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return self.own_tokens + self.clock.tokens

    @num_tokens.setter
    def num_tokens(self, count: int) -> None:
        self.own_tokens = count - self.clock.tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V is written, or is written by a step already scheduled."""
        return self.own_computed + self.clock.computed

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self.own_computed = count - self.clock.computed

    @property
    def in_cohort(self) -> bool:
        return self.clock is not NO_COHORT

    @property
    def num_output(self) -> int:
        """Output tokens known."""
        return self.num_tokens - self.num_prompt

    @property
    def output_tokens(self) -> list[int]:
        """A copy of the output token ids; empty for a request without token ids."""
        return self.tokens[self.num_prompt:] if self.tokens is not None else []

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (f"Request({self.id}, {self.status.value}, "
                f"{self.num_computed}/{self.num_tokens} computed, {len(self.block_table)} blocks)")


# --------------------------------------------------------------------------- content keys

def extend_keys(request: Request, num_blocks: int, block_size: int) -> list[Any]:
    """The request's first `num_blocks` content keys (fewer if fewer full blocks are known).

    A key names the block's tokens *and everything before them*: blake2b-128 over (parent key,
    token ids, and for the first block the salt), so equal keys mean equal K/V. Chained block
    hashing is vLLM's idea. Keys are kept on the request: a token is hashed once in its life.
    """
    keys = request.keys
    have = len(keys)
    if have >= num_blocks:
        return keys
    if request.own_keys is not None:
        return _extend_given_keys(request, num_blocks, block_size)
    tokens = request.tokens
    assert tokens is not None, "a request without token ids needs keys"
    num_blocks = min(num_blocks, len(tokens) // block_size)
    parent = keys[-1] if keys else b"tandem\0" + request.cache_salt.encode("utf-8", "surrogatepass")
    pack = _packer(block_size)
    for start in range(have * block_size, num_blocks * block_size, block_size):
        parent = blake2b(parent + pack(*tokens[start:start + block_size]), digest_size=16).digest()
        keys.append(parent)
    return keys


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    """Token ids of one block as little-endian 64-bit integers: no two blocks give equal bytes."""
    return Struct(f"<{block_size}q").pack


def num_given_keys(request: Request, block_size: int) -> int:
    """How many blocks have given keys: full blocks of the prompt, no more. A block that also holds
    output is nobody else's, whatever the workload says."""
    return min(len(request.own_keys or ()), request.num_prompt // block_size)


def _extend_given_keys(request: Request, num_blocks: int, block_size: int) -> list[Any]:
    """Given keys for the prompt's full blocks, then keys no other request can have: negative
    numbers, made from the request's place in line: before it has one, there are none of these.
    Given keys must not be negative numbers."""
    keys = request.keys
    num_blocks = min(num_blocks, request.num_tokens // block_size)
    given = min(num_blocks, num_given_keys(request, block_size))
    if len(keys) < given:
        assert request.own_keys is not None
        keys += request.own_keys[len(keys):given]
    if request.seq < 0:
        return keys
    first = -(request.seq + 1 << 32)
    keys += range(first + len(keys), first + num_blocks)
    return keys
