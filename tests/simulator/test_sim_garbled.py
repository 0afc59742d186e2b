"""Logs with wrong values inside: one sentence that names the event and the field, or a verdict."""

from __future__ import annotations

import copy
import gzip
import json
from random import Random

import pytest
from typer.testing import CliRunner

from engine.core.events import LoadedLog
from simulator.__main__ import app
from simulator.api import simulate
from simulator.chats import chats
from simulator.errors import ReplayError
from simulator.lengths import parse_lengths
from simulator.logcheck import FIELDS, check_log
from simulator.split import Split
from simulator.workload import closed_loop, fixed_list

ODD = (None, "x", -1, 1e400, float("nan"), [], {}, True, 1 << 200, [[1]], ["a"], 2.5, 99_999, 0)
SMALL = ("qwen3-0.6b", "l4")


def small_log():
    """(header, events) of a run that swaps, evicts and finds its prefixes again."""
    settings = {"num_blocks": 8, "num_cpu_blocks": 12, "preemption": "swap", "block_size": 4,
                "max_model_len": 30, "full_sequence_must_fit": False}
    work = chats(500.0, 5, parse_lengths("6:8", ""), parse_lengths("6", ""), turns=2, think=0.01)
    run = simulate(work, *SMALL, settings, keep_events=True)
    return {"tandem": 1, "schema": 1, **run.header}, run.events


def write(path, header, events):
    numbered = [{**event, "n": n} for n, event in enumerate(events)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *numbered)))
    return path


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def commands(path):
    yield "replay", path
    yield "compare", path
    yield "export", path, "--chrome", path.with_suffix(".chrome.json")
    yield "calibrate", path, "--hardware", "l4", "--out", path.with_suffix(".toml")


@pytest.fixture(scope="module")
def good():
    return small_log()


def first(events, kind):
    return next(n for n, event in enumerate(events) if event["e"] == kind)


@pytest.mark.parametrize("kind, field, value, must", [
    ("time", "seconds", "x", "seconds='x' must be a finite number of at least 0"),
    ("token", "tokens", None, "tokens=None must be a list of whole numbers or null"),
    ("time", "t", None, "t=None must be a finite number"),
    ("arrive", "params", 5, "params=5 must be an object of sampling parameters"),
    ("arrive", "params", {"temperature": "hot"}, "must be an object of sampling parameters"),
    ("finish", "outputs", "many", "outputs='many' must be a whole number of at least 0"),
    ("batch", "requests", ["nobody"], "request='nobody' must be one that has arrived"),
    ("batch", "free", "a", "free='a' must be a whole number of at least 0"),
    ("batch", "counts", [], "counts has 0 entries, must have one a request: 1"),
    ("time", "step", 99_999, "step=99999 must be 0, the first without a time, after its batch"),
    ("step_begin", "step", 7, "step=7 must be 0, the one after the step before it"),
    ("finish", "reason", ["a"], "must be 'stop' or 'length' or 'abort' or 'error'")])
def test_a_wrong_value_is_named_with_its_event_its_field_and_what_it_must_be(
        good, kind, field, value, must):
    header, events = good[0], copy.deepcopy(good[1])
    number = first(events, kind)
    events[number][field] = value
    with pytest.raises(ReplayError, match="run.jsonl: event") as error:
        check_log(LoadedLog(header, events), "run.jsonl")
    assert str(error.value).startswith(f"run.jsonl: event {number} ({kind}): ")
    assert must in str(error.value)


def test_missing_fields_repeated_arrivals_and_times_that_go_back_are_told(good):
    def problem(change):
        events = copy.deepcopy(good[1])
        change(events, first(events, "arrive"))
        with pytest.raises(ReplayError) as error:
            check_log(LoadedLog(good[0], events), "log")
        return str(error.value)

    assert "(arrive): prompt is missing, must be a whole number of at least 1" in problem(
        lambda events, n: events[n].pop("prompt"))
    assert "(arrive): it must come between a step_begin and its batch" in problem(
        lambda events, n: events.insert(0, events.pop(n)))
    assert "must not be one that is still running" in problem(
        lambda events, n: events.insert(n, events[n]))
    assert "(alloc): request='r0' must be one that has arrived" in problem(
        lambda events, n: events.pop(n))
    assert "must not be before the event before it" in problem(
        lambda events, n: events[-1].update(t=-1.0))


def test_commands_refuse_such_logs_with_one_sentence_and_exit_code_2(good, tmp_path):
    events = copy.deepcopy(good[1])
    number = [n for n, event in enumerate(events) if event["e"] == "step_begin"][6]
    events[number]["t"] = {}
    path = write(tmp_path / "bad.jsonl", good[0], events)
    for words in commands(path):
        result = call(*words)
        told = f"bad.jsonl: event {number} (step_begin): t={{}} must be a finite number"
        if result.exit_code == 2:
            assert told in result.stderr and result.stderr.count("\n") == 1
        else:  # nothing that is shown depends on it
            assert words[0] in ("export", "compare"), result.output


def test_a_log_cut_between_a_steps_time_and_its_tokens_replays_up_to_it(good, tmp_path):
    cuts = [n + 1 for n, event in enumerate(good[1]) if event["e"] == "time"][-2:]
    for end in cuts:
        result = call("replay", write(tmp_path / "cut.jsonl", good[0], good[1][:end]))
        assert result.exit_code == 0, result.exception
        assert "note: the log ends before its last step does" in result.output
        assert "identical: " in result.output


def test_a_header_without_objects_where_they_belong_is_told(good, tmp_path):
    for name, value in (("config", []), ("config", None), ("config", {"num_blocks": "x"})):
        path = write(tmp_path / "bad.jsonl", {**good[0], name: value}, good[1])
        for words in commands(path):
            result = call(*words)
            assert result.exception is None or isinstance(result.exception, SystemExit), words
    assert "num_blocks='x' must be a whole number of at least 1" in call(
        "export", path, "--html", tmp_path / "x.html").stderr


def mutants(events, count, seed=0):
    """`count` logs with one thing wrong each: a value, a missing field, events lost, repeated or
    swapped."""
    rng = Random(seed)
    places: dict = {}
    for number, event in enumerate(events):
        for field in event:
            if field not in ("n", "e"):
                places.setdefault((event["e"], field), []).append(number)
    changes = [(rng.choice(numbers), field, value) for (_, field), numbers in places.items()
               for value in (*ODD, "drop")]
    changes += [(rng.randrange(len(events) - 1), None, how) for how in ("lose", "twice", "swap")
                for _ in range(25)]
    for number, field, value in rng.sample(changes, min(count, len(changes))):
        bad = list(events)
        if field is None:
            here = bad[number:number + 1]
            bad[number:number + 1] = {"lose": [], "twice": here * 2,
                                      "swap": [*bad[number + 1:number + 2], *here]}[value]
            if value == "swap":
                del bad[number + 2]
        elif value == "drop":
            bad[number] = {name: each for name, each in bad[number].items() if name != field}
        else:
            bad[number] = {**bad[number], field: value}
        yield (number, events[number]["e"], field, value), bad


def test_no_garbled_log_ends_in_a_traceback(good, tmp_path):
    for index, (what, events) in enumerate(mutants(good[1], 60)):
        path = write(tmp_path / "bad.jsonl", good[0], events)
        words = list(commands(path))[index % 4]
        result = call(*words)
        assert result.exit_code in (0, 1, 2) and (
            result.exception is None or isinstance(result.exception, SystemExit)
        ), (words[0], what, result.exception)
        if result.exit_code == 2:
            assert result.stderr.count("\n") == 1


def runs():
    """Logs of every kind that a simulation writes."""
    yield simulate(closed_loop(3, 12, *[parse_lengths("4:9", "")] * 2), *SMALL, keep_events=True)
    yield simulate(fixed_list([(0.0, 9, 5)] * 6), *SMALL, {"num_blocks": 8, "block_size": 4},
                   keep_events=True)
    yield simulate(fixed_list([(0.0, 9, 5)] * 6), *SMALL, replicas=2, failures=[(0, 0.01)],
                   keep_events=True)
    yield simulate(fixed_list([(0.0, 9, 5), (0.1, 1 << 20, 1)]), *SMALL, split=Split(1, 1),
                   keep_events=True)


def test_every_log_that_a_run_writes_passes(good):
    check_log(LoadedLog(*good), "log")
    seen = {event["e"] for event in good[1]}
    for run in runs():
        for events in run.logs:
            check_log(LoadedLog({}, json.loads(json.dumps(events))), "log")
            seen |= {event["e"] for event in events}
    assert seen <= set(FIELDS)
    assert seen >= {"arrive", "reject", "swap", "share", "evict", "preempt", "finish"}


def test_the_log_of_the_lab_passes():
    with gzip.open("lab_app/data/tiny_crowded.jsonl.gz", "rt") as file:
        header, *events = map(json.loads, file)
    check_log(LoadedLog(header, events), "log")
