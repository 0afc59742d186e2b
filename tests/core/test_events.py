"""The event log: what is written, what is read back, and what is said of damage."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path

import pytest

import engine.core.events
from engine.core import LogError
from engine.core.events import KINDS, MODES, SCHEMA, EventLog, read_log
from engine.core.replay import Replayer
from tests.core.helpers import request, run, scheduler, submit

HEADER = {"mode": "simulated", "config": {"block_size": 4}, "seed": 7}


def a_run(log):
    """A run with hits, preemptions, forks and a rejection."""
    one = scheduler(6, 2, max_model_len=8, emit=log.emit)
    parent = request("p", [1, 2, 3], 4)
    submit(one, parent, request("c", [1, 2, 3], 3, parent=parent), request("a", [1, 2, 9], 5),
           request("b", [4] * 5, 3))
    one.reject(request("x", [1]), "no such token")
    log.now = 1.25
    run(one)
    log.now = 2.5
    log.emit("time", step=3, seconds=0.5, source="measured")
    return one


def written(path):
    with EventLog(path, HEADER) as log:
        a_run(log)
    return log


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path, name):
    log = written(tmp_path / name)
    loaded = read_log(str(tmp_path / name))
    assert loaded.problem is None
    assert loaded.header == {"tandem": 1, "schema": 1, **HEADER}
    assert len(loaded.events) == log.num_events > 40
    memory = EventLog(None, HEADER)
    a_run(memory)
    assert loaded.events == memory.events


def test_every_line_has_number_time_and_a_known_kind(tmp_path):
    written(tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines[1:]]
    assert [event["n"] for event in events] == list(range(len(events)))
    assert all(event["e"] in KINDS for event in events)
    assert [list(event)[:3] for event in events] == [["n", "t", "e"]] * len(events)
    times = [event["t"] for event in events]
    assert times == sorted(times) and set(times) == {1.25, 2.5}
    assert " " not in lines[5]  # compact


def test_the_kinds_are_those_that_the_documentation_lists():
    listed = re.findall(r"^    ([a-z_]+) {2,}", engine.core.events.__doc__, re.MULTILINE)
    assert set(listed) == KINDS and len(listed) == len(KINDS) == 18
    assert MODES == ("real", "simulated", "replayed")


def test_a_run_with_swaps_copies_and_failures_is_read_back_whole(tmp_path):
    with EventLog(tmp_path / "a.jsonl", HEADER) as log:
        one = scheduler(5, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4, emit=log.emit)
        parent = request("p", [9, 9], 3)
        submit(one, parent, request("c", [9, 9], 3, parent=parent))
        run(one)
        assert one.reset_prefix_cache()
        submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5))
        one.fail(one.schedule(), "boom")
        submit(one, request("d", [1] * 3, 5), request("e", [2] * 3, 5))
        run(one)
    loaded = read_log(tmp_path / "a.jsonl")
    assert loaded.problem is None and len(loaded.events) == log.num_events
    assert {event["e"] for event in loaded.events} == KINDS - {"reject", "time"}


def test_the_schema_is_1_and_a_log_written_before_resets_were_told_is_read():
    """Such a log tells the same as one `evict` a block; the replayed state is the same."""
    assert SCHEMA == 1
    log = EventLog(None, HEADER)
    one = scheduler(6, 2, emit=log.emit)
    submit(one, request("a", [1] * 5, 1))
    run(one)
    assert one.reset_prefix_cache()
    *before, reset = log.events
    assert (reset["e"], reset["blocks"]) == ("reset", 2)
    told = [{"n": reset["n"] + index, "t": 0.0, "e": "evict", "block": block, "key": key}
            for index, (block, key) in enumerate(Replayer(before).final.cached.items())]
    old = "".join(json.dumps(line) + "\n" for line in [log.header, *before, *told])
    loaded = read_log(io.StringIO(old))
    assert loaded.problem is None and len(loaded.events) == len(before) + 2
    assert Replayer(loaded.events).final == Replayer(log.events).final


def test_times_keep_nanoseconds_and_no_more():
    log = EventLog(None, {})
    log.now = 1 / 3
    log.emit("time", step=0, seconds=0.0)
    assert log.events[0]["t"] == 0.333333333


def test_lists_are_read_when_emitted_and_may_change_afterwards():
    log, blocks = EventLog(None, {}), [1, 2]
    log.emit("free", request="r", blocks=blocks)
    blocks.append(3)
    assert log.events[0]["blocks"] == [1, 2]


def test_values_that_json_does_not_know_are_written_as_text():
    log = EventLog(None, {})
    log.emit("evict", block=0, key=frozenset([1]))
    assert log.events[0]["key"] == "frozenset({1})"


def test_an_open_file_is_written_and_stays_open():
    file = io.StringIO()
    with EventLog(file, HEADER) as log:
        log.emit("reject", request="r", error="é")
        log.flush()
    assert not file.closed and log.events is None
    file.seek(0)
    loaded = read_log(file)
    assert loaded.events == [{"n": 0, "t": 0.0, "e": "reject", "request": "r", "error": "é"}]


def test_closing_twice_is_harmless_and_memory_logs_can_be_closed(tmp_path):
    log = EventLog(tmp_path / "a.jsonl", HEADER)
    log.close()
    log.close()
    memory = EventLog(None, HEADER)
    memory.flush()
    memory.close()
    assert memory.events == []


def test_a_flushed_log_is_readable_while_it_is_still_written(tmp_path):
    log = EventLog(tmp_path / "a.jsonl", HEADER)
    log.emit("reject", request="r", error="e")
    log.flush()
    assert len(read_log(tmp_path / "a.jsonl").events) == 1
    log.close()


@pytest.mark.parametrize("name, every", [("a.jsonl", 1), ("a.jsonl.gz", 512)])
def test_the_lines_of_a_settled_step_are_on_disk_and_of_a_gzipped_log_every_512(
        tmp_path, name, every):
    log = EventLog(tmp_path / name, HEADER)
    for _ in range(2 * every):
        log.emit("reject", request="r", error="e")
    log.settle()
    cut = tmp_path / f"cut-{name}"  # what a kill would leave
    cut.write_bytes((tmp_path / name).read_bytes())
    assert len(read_log(cut).events) == 2 * every
    log.emit("reject", request="r", error="e")
    log.settle()
    cut.write_bytes((tmp_path / name).read_bytes())
    assert len(read_log(cut).events) == 2 * every + (every == 1)
    log.close()
    assert len(read_log(tmp_path / name).events) == 2 * every + 1


def test_a_log_replaces_the_one_that_is_there_with_its_first_event_and_not_before(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("precious\n")
    EventLog(path, HEADER).close()
    assert path.read_text() == "precious\n"
    log = EventLog(path, HEADER)
    log.emit("reject", request="r", error="e")
    log.close()
    assert len(read_log(path).events) == 1


def test_a_run_without_events_leaves_a_header_where_nothing_was(tmp_path):
    log = EventLog(tmp_path / "a.jsonl", HEADER)
    assert not (tmp_path / "a.jsonl").exists()
    log.close()
    assert read_log(tmp_path / "a.jsonl").events == []


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        EventLog(tmp_path / "nowhere" / "a.jsonl", HEADER)


class FullDisk(io.StringIO):
    """Takes the header, then nothing."""

    def write(self, text):
        if self.tell():
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_ends_the_log_and_not_the_run():
    log = EventLog(FullDisk(), HEADER)
    with pytest.warns(UserWarning, match="cannot be written any further .No space left on device."
                                         ": the run goes on without it") as told:
        one = a_run(log)
    assert len(told) == 1 and not one.has_unfinished()
    assert log.problem == str(told[0].message) and log.num_events > 40
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("how", ["settle", "flush", "close"])
def test_a_full_disk_is_noticed_when_the_lines_are_flushed_or_the_file_is_closed(tmp_path, how):
    path = tmp_path / ("full.jsonl.gz" if how == "close" else "full.jsonl")
    path.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="cannot be written any further .No space left") as told:
        log = EventLog(path, {})
        log.emit("reject", request="r", error="e")
        getattr(log, how)()
    log.emit("reject", request="r", error="e")
    log.close()
    assert len(told) == 1 and "free some space or choose another place" in log.problem


def test_a_fault_of_the_file_without_a_number_is_told_in_its_own_words():
    class Odd(io.StringIO):
        def write(self, text):
            if self.tell():
                raise OSError("the quota is used up")
            return super().write(text)

    with pytest.warns(UserWarning, match="any further .the quota is used up.: the run goes on"):
        EventLog(Odd(), HEADER).emit("reject", request="r", error="e")


def test_a_log_that_gives_up_closes_its_own_file_and_leaves_a_strangers_open(tmp_path):
    for owned in (True, False):
        file = FullDisk()
        log = EventLog(file, HEADER)
        log._path = tmp_path / "a.jsonl" if owned else None
        with pytest.warns(UserWarning):
            log.emit("reject", request="r", error="e")
        assert file.closed is owned and log._file is None


def test_a_log_without_trouble_has_no_problem():
    assert EventLog(None, {}).problem is None


# --------------------------------------------------------------------------- damage

@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "good.jsonl"
    written(path)
    return path.read_bytes()


def test_a_log_cut_at_any_byte_of_its_last_lines_loads_all_whole_events(good, tmp_path):
    lines = good.splitlines(keepends=True)
    path = tmp_path / "cut.jsonl"
    begin = len(good) - sum(map(len, lines[-4:]))
    for size in range(begin, len(good) + 1):
        path.write_bytes(good[:size])
        whole = good[:size].count(b"\n") - 1
        tail = good[:size].rsplit(b"\n", 1)[1]
        complete = bool(tail) and good[size:size + 1] == b"\n"  # only its newline is missing
        loaded = read_log(path)
        assert len(loaded.events) == whole + complete
        assert loaded.events == [json.loads(line) for line in lines[1:whole + complete + 1]]
        if tail and not complete:
            assert loaded.problem == (f"{path} is damaged at line {whole + 2}: the {whole} events "
                                      f"before it are loaded")
        else:
            assert loaded.problem is None


def test_a_log_cut_inside_its_header_is_refused_with_line_1(good, tmp_path):
    path = tmp_path / "cut.jsonl"
    for size in range(good.index(b"\n")):
        path.write_bytes(good[:size])
        with pytest.raises(LogError, match="is no event log: its first line is not a Tandem "
                                           "header" if size else "is empty: no run is recorded "
                                                                 "in it") as refused:
            read_log(path)
        assert refused.value.line == 1


def test_a_gzipped_log_cut_anywhere_loads_a_prefix_or_is_refused_never_crashes(good, tmp_path):
    packed = gzip.compress(good, mtime=0)
    events = [json.loads(line) for line in good.splitlines()[1:]]
    path, loaded_some = tmp_path / "cut.jsonl.gz", 0
    for size in [*range(40), *range(40, len(packed), 7), len(packed) - 1]:
        path.write_bytes(packed[:size])
        try:
            loaded = read_log(path)
        except LogError as refused:
            assert str(path) in str(refused)
            continue
        assert loaded.events == events[:len(loaded.events)]
        assert f"is damaged at line {len(loaded.events) + 2}:" in loaded.problem
        loaded_some += len(loaded.events) > 0
    assert loaded_some > 10


def test_a_gzipped_log_with_a_flipped_byte_loads_a_prefix_or_is_refused(good, tmp_path):
    packed = gzip.compress(good, mtime=0)
    events = [json.loads(line) for line in good.splitlines()[1:]]
    path = tmp_path / "bad.jsonl.gz"
    damaged = 0
    for place in range(12, len(packed), 13):
        broken = bytearray(packed)
        broken[place] ^= 0x55
        path.write_bytes(bytes(broken))
        try:
            loaded = read_log(path)
        except LogError:
            damaged += 1
            continue
        damaged += loaded.problem is not None
        assert len(loaded.events) <= len(events)
    assert damaged > len(packed) // 13 - 10


BAD_LINES = [b'{"n": 5, "t": 0, "e": []}',
             b"{", b"[]", b"null", b"3", b'"text"', b"{}", b'{"n":5}', b'{"e":"free","n":99,"t":0}',
             b'{"e":"unheard","n":5,"t":0}', b"\xff\xfe",
             b'{"n":5,"t":0,"e":"time","step":0,"seconds":0} and more', b'{"n":5,"e":"time"}{}',
             pytest.param(b"[" * 100_000, id="deep"), pytest.param(b"1" * 5000, id="long number")]


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: line[:24].decode("latin1"))
def test_a_corrupt_line_is_named_and_everything_before_it_loads(good, tmp_path, bad):
    lines = good.splitlines(keepends=True)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"".join([*lines[:6], bad + b"\n", *lines[6:]]))
    loaded = read_log(path)
    assert loaded.events == [json.loads(line) for line in lines[1:6]]
    assert loaded.problem == (f"{path} is damaged at line 7: the 5 events before it are loaded")


def test_a_line_that_is_missing_is_found_by_the_gap_in_the_numbers(good, tmp_path):
    lines = good.splitlines(keepends=True)
    path = tmp_path / "gap.jsonl"
    path.write_bytes(b"".join(lines[:8] + lines[9:]))
    assert len(read_log(path).events) == 7
    assert "is damaged at line 9: the 7 events" in read_log(path).problem


def test_blank_lines_are_skipped_and_counted(good, tmp_path):
    lines = good.splitlines(keepends=True)
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b"".join([*lines[:3], b"\n", b"  \n", *lines[3:6], b"oops\n"]))
    loaded = read_log(path)
    assert len(loaded.events) == 5
    assert "damaged at line 9: the 5 events" in loaded.problem
    path.write_bytes(b"".join([*lines, b"\n\n"]))
    assert read_log(path).problem is None


@pytest.mark.parametrize("first", ["", "\n", "[]", "{}", "null", '{"tandom":1}', "hello"], ids=repr)
def test_a_file_without_a_header_is_no_event_log(first):
    with pytest.raises(LogError, match="^the log is no event log: its first line"):
        read_log(io.StringIO(first + "\n"))


def test_an_open_file_is_refused_by_its_name(tmp_path):
    (tmp_path / "b.jsonl").write_text("nothing\n")
    with open(tmp_path / "b.jsonl") as file, pytest.raises(LogError, match="b.jsonl is no event"):
        read_log(file)


def test_another_schema_is_refused_by_number():
    with pytest.raises(LogError, match="the log has schema 2, this version reads 1: record it "
                                       "again or use the version that wrote it") as refused:
        read_log(io.StringIO('{"tandem":1,"schema":2}\n'))
    assert refused.value.line == 1
    with pytest.raises(LogError, match="has schema None"):
        read_log(io.StringIO('{"tandem":1}\n'))


def test_a_missing_file_and_a_folder_are_refused_with_the_systems_reason(tmp_path):
    with pytest.raises(LogError, match=r"cannot read the log .*nothing.jsonl: No such file"):
        read_log(tmp_path / "nothing.jsonl")
    with pytest.raises(LogError, match="cannot read the log .*: Is a directory"):
        read_log(tmp_path)
    (tmp_path / "plain.jsonl.gz").write_text("not gzip")
    with pytest.raises(LogError, match="plain.jsonl.gz"):
        read_log(tmp_path / "plain.jsonl.gz")


def test_reading_leaves_the_garbage_collector_as_it_was(good, tmp_path):
    import gc
    (tmp_path / "good.jsonl").write_bytes(good)
    assert gc.isenabled()
    read_log(tmp_path / "good.jsonl")
    assert gc.isenabled()
    gc.disable()
    try:
        read_log(tmp_path / "good.jsonl")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_log_is_read_with_the_garbage_collector_at_rest(good):
    """A list of many small dicts that is walked again and again doubles the time of reading."""
    import gc

    class Watched(io.StringIO):
        def __next__(self):
            asked.append(gc.isenabled())
            return super().__next__()

    asked = []
    read_log(Watched(good.decode()))
    assert asked[0] and not any(asked[1:]) and len(asked) > 40


def test_a_log_that_ends_in_the_middle_still_replays(good, tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_bytes(good[:len(good) * 2 // 3])
    loaded = read_log(path)
    replayer = Replayer(loaded.events)
    assert replayer.num_steps > 0 and loaded.problem
    assert replayer.state_after(replayer.num_steps - 1).step == replayer.num_steps - 1
