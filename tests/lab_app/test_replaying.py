"""The lab's quick way into a log, beside the core's reader and replayer, which are its oracle."""

import gzip
import json
import random
from io import StringIO

import pytest

from engine.core.errors import LogError
from engine.core.events import LoadedLog, read_log
from engine.core.replay import Replayer
from lab_app.viewmodel.loglines import CHUNK, LogLines
from lab_app.viewmodel.replaying import MAX_SNAPSHOTS, Replaying
from lab_app.viewmodel.stretches import Stretch
from lab_app.viewmodel.timeline import TimelineReader
from tests.lab_app.made_logs import ahead, crowded, log_text, make_log

DECODES = [{"id": f"d{number}", "prompt": [number] * 3, "max_tokens": 300 + 40 * number,
            "at": 0.4 * number} for number in range(6)]
LOGS = {
    "crowded": lambda: crowded(),
    "another": lambda: crowded(seed=3),
    "long decodes": lambda: make_log(DECODES, num_blocks=300, block_size=16, max_model_len=600),
    "swaps": lambda: make_log(
        [{"id": f"s{n}", "prompt": 20, "max_tokens": 30} for n in range(8)], num_blocks=20,
        block_size=4, max_model_len=64, preemption="swap", num_cpu_blocks=40),
    "by priority": lambda: make_log(
        [{"id": f"p{n}", "prompt": [n] * 9, "max_tokens": 9, "priority": n % 3}
         for n in range(12)], num_blocks=12, block_size=4, max_model_len=32, order="priority"),
    "one step ahead": ahead,
}


def seen(state):
    """All of a state; token ids as far as they are known (the list behind them may run ahead)."""
    requests = {name: (request.known_tokens(), request.num_tokens, request.num_computed,
                       request.block_table, request.cpu_table, request.status, request.reason,
                       request.first_token, request.finished_at, request.preemptions, request.seq)
                for name, request in state.requests.items()}
    return (requests, state.step, state.time, state.waiting, state.running, state.swapped,
            state.finished, state.rejected, state.owners, state.cached, state.in_flight)


@pytest.fixture(scope="module", params=LOGS)
def log(request):
    return LOGS[request.param]()


def test_every_state_of_a_log_is_the_one_that_the_core_replays(log):
    quick, slow = Replaying(LogLines(log_text(log), "x"), log.header["config"]["order"]), Replayer(
        log.events, log.header["config"]["order"])
    assert (quick.num_steps, quick.num_events) == (slow.num_steps, len(log.events))
    assert seen(quick.final) == seen(slow.final)
    steps = list(range(slow.num_steps))
    for step in [*steps, *random.Random(1).sample(steps, min(len(steps), 60))]:
        assert quick.events_of(step) == list(slow.events_of(step))
        assert seen(quick.state_before(step)) == seen(slow.state_before(step)), step


def test_the_time_line_is_the_one_that_reading_event_by_event_gives(log):
    reader = TimelineReader()
    reader.read(log.events)
    assert Replaying(LogLines(log_text(log), "x")).timeline == reader.close()


def test_a_step_outside_the_log_is_an_index_error(log):
    replaying = Replaying(LogLines(log_text(log), "x"))
    for step in (-1, replaying.num_steps):
        with pytest.raises(IndexError, match=f"step {step} of {replaying.num_steps}"):
            replaying.state_before(step)


def long_log(steps):
    """One request that decodes for so many steps into a block without an end."""
    events = []
    for step in range(steps):
        events.append({"e": "step_begin", "step": step, "budget": 64})
        if step == 0:
            events += [
                {"e": "arrive", "request": "a", "prompt": 1, "limit": steps + 1, "at": 0.0},
                {"e": "consider", "request": "a", "verdict": "admitted", "reason": "ok"},
                {"e": "alloc", "request": "a", "blocks": [0], "first": 0}]
        events += [
            {"e": "batch", "step": step, "requests": ["a"], "starts": [step], "counts": [1],
             "partial": [], "waiting": 0, "running": 1, "swapped": 0, "free": 0},
            {"e": "time", "step": step, "seconds": 0.5},
            {"e": "token", "step": step, "tokens": [step % 50]}]
    return LoadedLog({"tandem": 1, "schema": 1, "config": {}},
                     [{"n": n, "t": n / 8, **event} for n, event in enumerate(events)])


def test_a_long_log_keeps_few_snapshots_and_every_state_can_still_be_had():
    steps = 64 * MAX_SNAPSHOTS + 700
    replaying = Replaying(LogLines(log_text(long_log(steps)), "x"))
    assert replaying.num_steps == steps
    assert MAX_SNAPSHOTS / 2 < len(replaying._snapshots) <= MAX_SNAPSHOTS
    for step in (1, 63, 64, 65, 12_345, 64 * MAX_SNAPSHOTS, steps - 1):
        request = replaying.state_before(step).requests["a"]
        assert request.num_computed == step
        assert request.known_tokens() == [place % 50 for place in range(step)]


def file_text(requests):
    """A log as EventLog writes it into a file, byte by byte."""
    target = StringIO()
    make_log(requests, target=target, num_blocks=300, block_size=16, max_model_len=600)
    return target.getvalue().encode()


def test_equal_steps_of_a_log_that_the_engine_writes_are_taken_together(monkeypatch):
    log = make_log(DECODES, num_blocks=300, block_size=16, max_model_len=600)
    taken = []
    take = Stretch.take
    monkeypatch.setattr(Stretch, "take",
                        lambda stretch, found: taken.append(take(stretch, found)) or taken[-1])
    replaying = Replaying(LogLines(file_text(DECODES), "x"))
    assert replaying.num_steps == Replayer(log.events).num_steps
    assert sum(taken) > 0.9 * replaying.num_steps


# --------------------------------------------------------------------------- damage
def problem_of(data, name="x.jsonl"):
    """(problem, sound events, steps) by the quick way, and the reader's problem and events."""
    stream = StringIO(data.decode("utf-8", errors="replace"), newline=None)
    stream.name = name
    core = read_log(stream)
    lines = LogLines(data, name)
    replaying = Replaying(lines)
    return (lines.problem, replaying), core


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_log_opens_as_far_as_the_core_reads_it_and_says_the_same(seed):
    draw, data = random.Random(seed), bytearray(log_text(crowded()))
    header = data.index(b"\n") + 1
    place = draw.randrange(header, len(data))
    how = seed % 5
    if how == 0:
        del data[place:]
    elif how == 1:
        data[place] = draw.randrange(256)
    elif how == 2:
        del data[place:place + draw.randrange(1, 400)]
    elif how == 3:
        data[place:place] = bytes(draw.randrange(256) for _ in range(9))
    else:
        end = data.index(b"\n", place) + 1
        data[end:end] = b"\n  \r\n"  # blank lines are no damage
    (problem, replaying), core = problem_of(bytes(data))
    assert problem == core.problem or replaying.problem
    assert replaying.num_events <= len(core.events)
    if replaying.problem is None:
        assert replaying.num_events == len(core.events)
        assert seen(replaying.final) == seen(Replayer(core.events).final)


def test_a_log_written_with_spaces_and_a_number_that_is_none_is_no_damage():
    log = crowded()
    log.events[-1]["seconds"] = float("nan")
    data = b"".join(json.dumps(line).encode() + b"\r\n" for line in (log.header, *log.events))
    (problem, replaying), core = problem_of(data)
    assert problem is None is core.problem
    assert seen(replaying.final) == seen(Replayer(log.events).final)


@pytest.mark.parametrize("spoil", [{"blocks": [99]}, {"blocks": None}, {"request": "nobody"}])
def test_a_contradiction_is_named_by_its_event_and_everything_before_it_is_shown(spoil):
    log = crowded()
    number = [n for n, event in enumerate(log.events) if event["e"] == "free"][5]
    log.events[number] = {**log.events[number], **spoil}
    replaying = Replaying(LogLines(log_text(log), "x"))
    with pytest.raises(LogError) as core:
        Replayer(log.events)
    assert replaying.problem == f"{core.value}; the {number} events before that one are shown"
    assert seen(replaying.final) == seen(Replayer(log.events[:number]).final)
    last = replaying.num_steps - 1
    assert replaying.events_of(last) == list(Replayer(log.events[:number]).events_of(last))
    assert replaying.timeline.num_steps == replaying.num_steps


def test_a_batch_that_skips_a_position_contradicts_the_log_also_within_equal_steps():
    log = make_log(DECODES, num_blocks=300, block_size=16, max_model_len=600)
    number = [n for n, event in enumerate(log.events) if event["e"] == "batch"][400]
    log.events[number]["starts"][-1] += 1
    replaying = Replaying(LogLines(log_text(log), "x"))
    assert replaying.problem.startswith(f"event {number} (batch) contradicts the log before it")
    assert replaying.num_events == number and replaying.num_steps == replaying.timeline.num_steps


def test_a_gzipped_log_that_is_cut_or_corrupt_opens_up_to_there(tmp_path):
    log = make_log(DECODES, num_blocks=300, block_size=16, max_model_len=600)
    whole = gzip.compress(log_text(log))
    path = tmp_path / "z.jsonl.gz"
    path.write_bytes(whole)
    lines = LogLines.read(path)
    assert Replaying(lines).num_events == len(log.events) and lines.problem is None
    path.write_bytes(whole[:-9])
    lines = LogLines.read(path)
    opened = Replaying(lines)
    assert 0 < opened.num_events <= len(log.events)
    assert f"the {opened.num_events} events before it are loaded" in lines.problem
    path.write_bytes(whole[:30])
    with pytest.raises(LogError, match="is no event log"):
        LogLines.read(path)


def test_a_line_longer_than_a_chunk_is_one_line():
    header = {"tandem": 1, "schema": 1, "config": {}}
    long = {"n": 0, "t": 0.0, "e": "arrive", "request": "a", "prompt": CHUNK, "limit": CHUNK + 1,
            "at": 0.0, "params": {}, "stop_ids": [], "tokens": [7] * CHUNK}
    begin = {"n": 1, "t": 0.0, "e": "step_begin", "step": 0, "budget": 1}
    replaying = Replaying(LogLines(log_text(LoadedLog(header, [long, begin])), "x"))
    assert (replaying.num_events, replaying.num_steps) == (2, 1)
    assert replaying.final.requests["a"].tokens == [7] * CHUNK
