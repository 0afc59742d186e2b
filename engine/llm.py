"""LLM: the offline API, in the shape that vLLM and nano-vllm users know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any

from engine.config import make_config
from engine.core.errors import RequestError
from engine.core.events import EventLog
from engine.core.request import Request, SamplingParams
from engine.outputs import RequestOutput
from engine.parallel import become_worker_if_told, with_world
from engine.prompts import (
    Prompt,
    PromptError,
    as_conversations,
    as_list,
    one_each,
    read_prompt,
)
from engine.runner.build import build_engine
from engine.runner.counter_rng import derive_seed
from engine.runner.interrupts import deliver_interrupts, interrupts_held
from engine.runner.session import Session
from engine.stream import Stream


class LLM:
    """A model ready to generate. Several may live in one process.

        llm = LLM("smollm2", max_num_seqs=16)
        out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
        out[0].text

    Keywords are EngineConfig's fields; `log` records the run as an event log; `scheduler_options`
    hands objects (policies, a pool) to the Scheduler. A ConfigError or WeightsError says what
    cannot work. With tensor_parallel_size > 1 it starts the other ranks itself, and a ParallelError
    names the rank that is lost; under torchrun the constructor returns in rank 0 alone. A request
    that is refused raises RequestError and leaves the engine usable.
    """

    def __init__(self, model: str | Path, *, log: str | Path | IO[str] | EventLog | None = None,
                 scheduler_options: dict[str, Any] | None = None, **config: Any):
        self.config = with_world(make_config(str(model), **config))
        become_worker_if_told(self.config)
        self.engine = build_engine(self.config, log,
                                   {} if scheduler_options is None else scheduler_options)
        self._names = count()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None if the model directory has none."""
        return self.engine.tokenizer.hf if self.engine.tokenizer else None

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get: the model's generation_config.json, over
        SamplingParams' own defaults. Start from it with dataclasses.replace()."""
        return self.engine.defaults

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = False, *,
                 priority: int | Sequence[int] = 0) -> list[RequestOutput]:
        """Run prompts to their end, together; results in the order of the prompts.

        A prompt is text, a list of token ids, or a dict with `prompt` or `prompt_token_ids` and,
        if wanted, `cache_salt` and `priority`. One params for all, or one each; they hold alone,
        and without any the model's own defaults do. A max_tokens that max_model_len does not leave
        room for is cut to what it leaves. PromptError (a RequestError), with nothing run, names the
        first prompt that cannot be served; a request that fails while it runs has finish_reason
        "error" and its `error`. A Ctrl-C takes effect between two steps, and aborts all of them.
        """
        asked = as_list(prompts)
        with interrupts_held():
            groups = self._submit(asked, sampling_params, priority)
            sessions = [session for group in groups for session in group]
            try:
                for session in _progress(sessions) if use_tqdm else sessions:
                    self._run_until_finished(session)
                return [self._result(group) for group in groups]
            finally:
                self._close(sessions)

    def chat(self, messages: Sequence[Any],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             chat_template: str | None = None) -> list[RequestOutput]:
        """generate() on one conversation, a list of {"role", "content"}, or on a list of them."""
        return self.generate(self.render_chat(messages, chat_template), sampling_params)

    def render_chat(self, messages: Sequence[Any],
                    chat_template: str | None = None) -> list[Prompt]:
        """One token-id prompt a conversation, by the model's chat template."""
        if self.engine.tokenizer is None:
            raise RequestError(f"chat needs a tokenizer, and {self.config.model} has none")
        conversations, many = as_conversations(messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(self.engine.tokenizer.encode_chat(conversation, chat_template))
            except RequestError as error:
                raise PromptError(index, many and len(conversations) > 1, error) from None
        return prompts

    def stream(self, prompts: Prompt | Sequence[Prompt],
               sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               priority: int | Sequence[int] = 0) -> Stream:
        """Yield what each step adds to each prompt, as it comes; the joined texts of a prompt's
        deltas are its text. Submits at once; closing or dropping the iterator, also one that nobody
        has asked for a delta, aborts what still runs."""
        asked = as_list(prompts)
        with interrupts_held():
            groups = self._submit(asked, sampling_params, priority)
            return Stream(self.engine, [session for group in groups for session in group])

    def close(self) -> None:
        """Finish the log and end the other ranks. The engine may not be used any more."""
        self.engine.shut_down()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ behind the scenes
    def _run_until_finished(self, session: Session) -> None:
        while not session.done:
            if not self.engine.step() and not session.done:
                raise RuntimeError(f"the scheduler is idle, and {session.request!r} not finished")
            deliver_interrupts()

    def _submit(self, prompts: list[Prompt],
                params: SamplingParams | Sequence[SamplingParams] | None,
                priority: int | Sequence[int]) -> list[list[Session]]:
        """All prompts queued, n sessions each; none of them if one is refused. For callers that
        hold interrupts until they have taken charge of the sessions."""
        all_params = one_each("sampling_params", self.engine.defaults if params is None
                              else params, len(prompts))
        priorities = one_each("priority", priority, len(prompts))
        groups: list[list[Session]] = []
        try:
            for item in zip(prompts, all_params, priorities, strict=True):
                groups.append([])
                self._submit_samples(*item, groups[-1])
                deliver_interrupts()
        except RequestError as error:
            self._close([session for group in groups for session in group])
            raise PromptError(len(groups) - 1, len(prompts) > 1, error) from None
        except BaseException:
            self._close([session for group in groups for session in group])
            raise
        return groups

    def _submit_samples(self, prompt: Prompt, params: SamplingParams, priority: int,
                        group: list[Session]) -> None:
        name = f"r{next(self._names)}"
        ids, text, extra = read_prompt(name, prompt, self.engine.tokenizer)
        parent: Request | None = None
        for number in range(params.n):
            request = Request(
                f"{name}.{number}" if number else name, ids, _sample_params(params, number),
                eos_ids=self.engine.runner.config.eos_token_ids, arrival_time=self.engine.clock(),
                priority=extra.get("priority", priority), cache_salt=extra.get("cache_salt", ""),
                parent=parent, user=text)
            group.append(self.engine.submit(request, owner=name, index=number))
            parent = parent or request

    def _result(self, group: list[Session]) -> RequestOutput:
        first = group[0].request
        assert first.tokens is not None
        return RequestOutput(first.id, first.user, first.tokens[:first.num_prompt],
                             [session.output() for session in group], first.num_hit)

    def _close(self, sessions: list[Session]) -> None:
        if self.engine.closed:
            return  # it took all of them with it
        self.engine.close(*sessions)


def _progress(sessions: list[Session]) -> Iterable[Session]:
    from tqdm import tqdm
    return tqdm(sessions)


def _sample_params(params: SamplingParams, number: int) -> SamplingParams:
    """The params of sample `number`: its own seed, so that samples of one prompt differ."""
    if params.n == 1:
        return params
    seed = params.seed if params.seed is None or not number else derive_seed(params.seed, number)
    return replace(params, n=1, seed=seed)
