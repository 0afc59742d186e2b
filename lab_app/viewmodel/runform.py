"""The Run page's form: what the real engine is asked to do. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.errors import TandemError

MAX_PROMPTS = 64

PROMPTS = {  # shown first, by model; several share a beginning, so the prefix cache has work
    "tiny": """What is the capital of France?
What is the capital of Japan?
What colour is a fox?
Where does the whale live?
What is the opposite of big?
What is the capital of Egypt?
What does a bear eat?
Tell me a story about a frog.""",
    "smollm2": """What is the capital of France?
Explain in one sentence why the sky is blue.
Write a haiku about a tandem bicycle.
What is the capital of Japan?
List three uses of a paper clip.
Why do cats purr?""",
}


class RunFormError(TandemError):
    """A field of the form that cannot be used; the sentence names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForm:
    """What the page asks for. The pool is small on purpose: it makes the engine preempt."""

    model: str = "tiny"
    prompts: str = PROMPTS["tiny"]
    copies: int = 1  # how often the list is submitted
    chat: bool = True
    max_tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    num_blocks: int = 20
    block_size: int = 8
    budget: int = 64
    seats: int = 8
    batching: str = "mixed"
    preemption: str = "recompute"


def read_prompts(form: RunForm) -> list[str]:
    """One prompt a line, the list as often as asked. RunFormError if there is none, or too many."""
    lines = [line.strip() for line in form.prompts.splitlines() if line.strip()] * form.copies
    if not lines:
        raise RunFormError("There is no prompt: write at least one line.")
    if len(lines) > MAX_PROMPTS:
        raise RunFormError(f"These are {len(lines)} prompts, this page runs at most {MAX_PROMPTS}: "
                           "leave some out, or lower the number of copies.")
    return lines


def engine_settings(form: RunForm) -> dict[str, Any]:
    """Keywords for engine.llm.LLM. A request may grow to what the pool holds."""
    return {
        "num_kvcache_blocks": form.num_blocks, "kvcache_block_size": form.block_size,
        "max_num_batched_tokens": form.budget, "max_num_seqs": form.seats,
        "batching": form.batching, "preemption": form.preemption,
        "max_model_len": min(form.num_blocks * form.block_size, 2048), "seed": form.seed}


@dataclass(slots=True)
class Transcript:
    """The text of one prompt so far."""

    prompt: str
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def state(self) -> str:
        """"running", or how it ended, with the number of tokens."""
        if self.error:
            return self.error
        ended = {None: "running", "stop": "finished", "length": "stopped at max_tokens",
                 "abort": "aborted"}.get(self.finish_reason, str(self.finish_reason))
        return f"{ended}, {self.tokens} token{'' if self.tokens == 1 else 's'}"
