"""Streams that are dropped, closed or read by other threads, at the worst of moments."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.core.errors import RequestError
from engine.core.events import read_log
from engine.core.request import Request
from simulator.replay import replay

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])


@pytest.fixture
def make():
    """make(**options) -> LLM on the tiny model, closed after the test."""
    made: list[LLM] = []

    def one(**options: Any) -> LLM:
        made.append(LLM("tiny", **options))
        return made[-1]
    yield one
    for llm in made:
        llm.close()


@pytest.fixture(autouse=True)
def collected_only_when_asked():
    """Else a stream may be found sooner than the test wants."""
    gc.disable()
    yield
    gc.enable()


class Client:
    """Holds a stream, and itself: only the collector gets rid of it."""

    def __init__(self, llm: LLM):
        self.me, self.stream = self, llm.stream("The fox is red,", LONG)


def run_inside_a_step(llm: LLM, action, at: int) -> None:
    """Call `action` once, in the middle of the `at`-th step from now."""
    runner, count = llm.engine.runner, 0
    before = runner.run if llm.engine.pipeline is None else llm.engine.pipeline.start
    name, owner = (("run", runner) if llm.engine.pipeline is None
                   else ("start", llm.engine.pipeline))

    def wrapped(*args):
        nonlocal count
        count += 1
        if count == at:
            action()
        return before(*args)
    setattr(owner, name, wrapped)


@overlap
@pytest.mark.parametrize("at", [2, 5, 11])
def test_a_stream_collected_inside_a_step_hurts_nobody(make, overlap, at):
    llm = make(overlap=overlap)
    alone = llm.generate("Once upon a time", SHORT)[0]
    client = Client(llm)
    next(client.stream)
    request = next(iter(llm.engine.sessions.values())).request
    run_inside_a_step(llm, lambda: (gc.collect(), collected.append(request.finish_reason)), at)
    collected: list[str | None] = []
    del client
    beside = llm.generate("Once upon a time", SHORT)[0]
    assert collected == [None]  # the finalizer did run there, and ended nothing there
    assert (beside.text, beside["token_ids"]) == (alone.text, alone["token_ids"])
    assert request.finish_reason == "abort" and not llm.engine.sessions
    assert not llm.engine.scheduler.has_unfinished()
    assert not llm.engine.scheduler.manager.pool.used
    assert llm.generate("Once upon a time", SHORT)[0].text == alone.text


@pytest.mark.parametrize("at", [1, 2, 5, 11])
def test_a_stream_collected_by_the_thread_that_computes_waits_for_nobody(make, at):
    """A step waits for that thread, so it must not wait for the step."""
    llm = make(overlap=True)
    alone = llm.generate("Once upon a time", SHORT)[0]
    client = Client(llm)
    next(client.stream)
    request = next(iter(llm.engine.sessions.values())).request
    launch, where = llm.engine.runner.launch, []

    def collecting(step):
        where.append(threading.current_thread().name)
        if len(where) == at:
            gc.collect()
        launch(step)
    llm.engine.runner.launch = collecting
    del client
    beside = llm.generate("Once upon a time", SHORT)[0]
    assert where[0].startswith("tandem-")
    assert (beside.text, beside["token_ids"]) == (alone.text, alone["token_ids"])
    assert request.finish_reason == "abort" and not llm.engine.sessions
    assert not llm.engine.scheduler.has_unfinished()
    assert not llm.engine.scheduler.manager.pool.used


@overlap
def test_a_stream_collected_while_a_request_is_submitted_waits_for_no_step(make, overlap):
    """Whoever submits may hold what the step needs that another thread is in."""
    engine = (llm := make(overlap=overlap)).engine
    client = Client(llm)
    next(client.stream)
    request = next(iter(engine.sessions.values())).request
    submit = engine.scheduler.submit

    def collecting(one):
        gc.collect()
        submit(one)
    engine.scheduler.submit = collecting
    del client
    other = threading.Thread(target=engine.submit, args=(Request("new", [1, 2, 3], SHORT),),
                             daemon=True)
    with engine._lock:  # a step that is under way
        other.start()
        other.join(20)
        assert not other.is_alive()
    while engine.step():
        pass
    assert request.finish_reason == "abort" and list(engine.sessions) == ["new"]
    assert not engine.scheduler.manager.pool.used


def test_a_finalizer_in_the_thread_that_computes_may_not_run_requests(make):
    llm, told = make(overlap=True), []
    launch = llm.engine.runner.launch

    def running(step):
        try:
            llm.generate("Once", SHORT)
        except RequestError as error:
            told.append(str(error))
        launch(step)
    llm.engine.runner.launch = running
    llm.engine.submit(Request("r", [1, 2, 3], SHORT))
    while llm.engine.step() and not told:
        pass
    assert "inside a step of this engine" in told[0]


@overlap
def test_a_stream_collected_in_the_last_step_of_all_is_aborted_in_it(make, overlap):
    """Nobody may ask for another step, and its blocks must not stay with it."""
    llm = make(overlap=overlap)
    client = Client(llm)
    next(client.stream)
    request = next(iter(llm.engine.sessions.values())).request
    run_inside_a_step(llm, gc.collect, 1)
    del client
    assert llm.engine.step()
    assert request.finish_reason == "abort" and not llm.engine.scheduler.has_unfinished()


def test_a_callback_may_not_run_requests_inside_a_step(make):
    llm = make()
    llm.engine.on_step = lambda *_: llm.generate("Once", SHORT)
    with pytest.raises(RequestError, match="inside a step"):
        llm.generate("Once upon a time", SHORT)


@overlap
def test_what_a_callback_raises_reaches_the_caller_and_the_engine_goes_on(make, overlap, tmp_path):
    llm = make(overlap=overlap, log=tmp_path / "run.jsonl")
    alone = llm.generate("Once upon a time", SHORT)[0]

    def fail(*_):
        raise KeyError("mine")
    llm.engine.on_step = fail
    with pytest.raises(KeyError, match="mine"):
        llm.generate(["Once upon a time", "The fox"], SHORT)
    llm.engine.on_step = None
    assert llm.generate("Once upon a time", SHORT)[0]["token_ids"] == alone["token_ids"]
    assert not llm.engine.scheduler.has_unfinished()
    assert not llm.engine.scheduler.manager.pool.used
    llm.close()
    assert replay(read_log(tmp_path / "run.jsonl")).identical


@overlap
def test_a_request_with_the_name_of_one_that_runs_is_refused_and_the_other_goes_on(make, overlap):
    engine = make(overlap=overlap).engine
    first = engine.submit(Request("same", [1, 2, 3, 4], SHORT))
    engine.step()
    with pytest.raises(RequestError, match="'same' is already taken by a request that still runs"):
        engine.submit(Request("same", [5, 6, 7], SHORT))
    while engine.step():
        pass
    assert first.done and first.request.finish_reason == "length"
    again = engine.submit(Request("same", [5, 6, 7], SHORT))  # the name is free again
    engine.close(first)
    while engine.step():
        pass
    assert again.done and again.request.num_output == 12 and engine.sessions == {"same": again}


def test_done_is_true_only_when_the_last_delta_is_there(make):
    """Whoever looks from another thread sees done either with the last delta, or not yet."""
    llm = make()
    stream = llm.stream("Once upon a time", SHORT)
    session = next(iter(llm.engine.sessions.values()))
    seen = []

    class Watched(type(session.timings)):
        def __setattr__(self, name, value):
            if name == "finish" and value is not None:
                seen.append((session.inbox[-1].finish_reason, session.text.text))
            super().__setattr__(name, value)

    timings = session.timings
    session.timings = Watched(timings.arrival)
    text = "".join(delta.text for delta in stream)
    assert seen == [("length", text)]


def test_an_inbox_that_is_emptied_by_somebody_else_gives_none(make):
    llm = make()
    stream = llm.stream("Once upon a time", SHORT)
    session = next(iter(llm.engine.sessions.values()))
    assert session.take() is None
    while llm.engine.step():
        pass
    deltas = []
    while (delta := session.take()) is not None:
        deltas.append(delta)
    assert sum(len(delta.token_ids) for delta in deltas) == 12
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert list(stream) == []


@overlap
def test_a_stream_of_a_closed_engine_says_so(make, overlap, tmp_path):
    llm = make(overlap=overlap, log=tmp_path / "run.jsonl")
    stream = llm.stream("Once upon a time", LONG)
    next(stream)
    llm.close()
    with pytest.raises(RequestError, match="this engine is closed"):
        list(stream)


@overlap
@pytest.mark.parametrize("elsewhere", [False, True], ids=["callback", "thread"])
def test_a_second_reader_at_the_same_moment_is_refused_and_the_first_reads_on(make, overlap,
                                                                              elsewhere):
    llm, told = make(overlap=overlap), []
    stream = llm.stream("Once upon a time", SHORT)

    def read() -> None:
        try:
            next(stream)
        except RequestError as error:
            told.append(str(error))

    def read_too(*_) -> None:
        if not elsewhere:
            return read()
        other = threading.Thread(target=read)
        other.start()
        other.join(60)
    llm.engine.on_step = read_too
    deltas = list(stream)
    assert sum(len(delta.token_ids) for delta in deltas) == 12
    assert deltas[-1].finish_reason == "length" and not llm.engine.sessions
    assert len(told) == 12 and all("is being read already" in sentence for sentence in told)


def test_a_value_error_of_a_step_is_no_second_reader(make):
    llm = make()

    def fail(*_) -> None:
        raise ValueError("mine")
    llm.engine.on_step = fail
    with pytest.raises(ValueError, match="mine"):
        next(llm.stream("Once upon a time", SHORT))
    assert not llm.engine.sessions


@overlap
def test_closing_while_another_thread_generates_ends_it_with_a_sentence(make, overlap, tmp_path):
    llm = make(overlap=overlap, log=tmp_path / "run.jsonl")
    started, ended = threading.Event(), []
    llm.engine.on_step = lambda *_: started.set()

    def work() -> None:
        try:
            ended.append(llm.generate("Once upon a time", LONG)[0].finish_reason)
        except RequestError as error:
            ended.append(str(error))
    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    llm.close()
    thread.join(60)
    assert not thread.is_alive() and len(ended) == 1
    assert "this engine is closed" in ended[0]
