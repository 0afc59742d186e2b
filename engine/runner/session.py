"""One sample of one prompt from the engine's side: its request, text, moments, logprobs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from engine.core.request import Request
from engine.outputs import CompletionOutput, Delta, Logprob, Timings
from engine.runner.detokenizer import Detokenizer, StopFinder, TextStream
from engine.runner.sampler import TokenLogprobs
from engine.runner.tokenizer import TextTokenizer


@dataclass(slots=True)
class Session:
    """Made with its request, fed once a step, read when it is over."""

    request: Request
    owner: str  # id of the prompt: its first sample's request id
    index: int
    tokenizer: TextTokenizer | None
    timings: Timings
    text: TextStream | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    inbox: deque[Delta] = field(default_factory=deque)  # deltas nobody has taken yet

    def __post_init__(self) -> None:
        params, tokens = self.request.params, self.request.tokens
        if self.tokenizer is not None and tokens is not None:
            self.text = TextStream(
                Detokenizer(self.tokenizer.decode, tokens, self.tokenizer.fallback),
                StopFinder(params.stop),
                params.include_stop_str_in_output, params.min_tokens)

    def push(self, token: int, number: int, now: float, logprobs: TokenLogprobs | None) -> str:
        """Take output token `number` (1 is the first); the text to show for it."""
        if self.timings.first_token is None:
            self.timings.first_token = now
        if logprobs is not None:
            self.logprobs.append(logprobs)
        request = self.request
        ends = token in request.stop_ids and number >= request.params.min_tokens
        if self.text is None or (ends and not request.params.include_stop_str_in_output):
            return ""
        return self.text.push(token)

    @property
    def done(self) -> bool:
        """True once the end was reported, with the last delta in the inbox. `request.finished` may
        be true a step before."""
        return self.timings.finish is not None

    @property
    def stopped(self) -> bool:
        """True if the text completed a stop string."""
        return self.text is not None and self.text.stop is not None

    def take(self) -> Delta | None:
        """The next delta, if there is one. Only the inbox itself is asked, once: the thread that
        steps may put one in, or take its last one back, at any moment."""
        try:
            return self.inbox.popleft()
        except IndexError:
            return None

    def finish(self, now: float) -> None:
        """The request ended: the last delta carries the rest of its text and the reason. `done` is
        true only after that, for another thread may be waiting for it."""
        text = self.text.finish() if self.text is not None else ""
        try:
            last = self.inbox.pop()
        except IndexError:
            last = Delta(self.owner, self.index, "", ())
        self.inbox.append(replace(last, text=last.text + text, error=self.request.error,
                                  finish_reason=self.request.finish_reason))
        self.timings.finish = now

    def output(self) -> CompletionOutput:
        """The sample as it stands."""
        request = self.request
        tokens = request.output_tokens
        return CompletionOutput(
            self.index, self.text.text if self.text else "", tokens, request.finish_reason,
            self._stop_reason(tokens), request.error,
            [self._candidates(entry) for entry in self.logprobs] if self.logprobs else None,
            sum(entry.logprob for entry in self.logprobs) if self.logprobs else None,
            request.num_preemptions, self.timings)

    def _stop_reason(self, tokens: list[int]) -> str | int | None:
        if self.text is not None and self.text.stop is not None:
            return self.text.stop
        last = tokens[-1] if tokens else None
        return last if last in self.request.params.stop_token_ids else None

    def _candidates(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        found = {token: Logprob(value, rank, self._text_of(token))
                 for rank, (token, value) in enumerate(entry.top, start=1)}
        found.setdefault(entry.token_id,
                         Logprob(entry.logprob, entry.rank, self._text_of(entry.token_id)))
        return found

    def _text_of(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.hf.decode([token])
