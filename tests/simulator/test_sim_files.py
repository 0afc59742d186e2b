"""Every file a user gives to a command, spoilt in every way: one sentence, with the way out."""

import errno
import gzip
import json
import zlib

import pytest
from typer.testing import CliRunner

from engine.mistakes import file_sentence, read_text, usage_sentence
from simulator.__main__ import app
from simulator.errors import SpecError, WorkloadError
from simulator.sources import make_workload
from simulator.words import spell, spell_rate

RUN = ("run", "--poisson", 1, "--num-requests", 2)
COMMANDS = {  # a command's words around the file -> the file's name
    "trace": (("run", "--trace"), "t.csv"), "json trace": (("run", "--trace"), "t.jsonl"),
    "lengths": ((*RUN, "--input-len"), "trace:t.csv"),
    "policies": (("policies", "--trace"), "t.csv"),
    "capacity": (("capacity", "--slo", "ttft_p99=1", "--trace"), "t.csv"),
    "model": ((*RUN, "--model"), "config.json"), "device": ((*RUN, "--hardware"), "mine.toml"),
    "machine": ((*RUN, "--cost"), "machine.toml"), "plan": (("sweep",), "plan.toml"),
    "replay": (("replay",), "r.jsonl"), "compare": (("compare",), "r.jsonl"),
    "calibrate": (("calibrate",), "r.jsonl"), "export": (("export", "--html", "x.html"), "r.jsonl")}
CONTENTS = {
    "missing": None, "folder": None, "empty": b"", "binary": bytes(range(256)) * 9,
    "latin": "Größe,prompt,output\n1,2,3\n".encode("latin-1"),
    "other": b"hello, I am something else\n"}


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_spoilt_file_is_one_sentence_that_names_it(command, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, name = COMMANDS[command]
    path = tmp_path / name.removeprefix("trace:")
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(CONTENTS[kind])
    result = call(*words, name)
    assert result.exit_code == 2, result.output
    told = result.stderr
    assert told.count("\n") == 1 and path.name in told, told
    for word in ("Errno", "codec", "NoneType", "Traceback", "No such file", "Is a directory",
                 "\x00", "char 0"):
        assert word not in told, told
    assert any(word in told for word in (
        "give ", "check the path", "name a file in it", "save it as", "correct it", "create it",
        "correct the row", "or name yours with", "wanted ")), told


@pytest.mark.parametrize("command", ["trace", "replay", "compare", "calibrate"])
def test_a_gzipped_file_that_is_cut_or_damaged_says_so(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, name = COMMANDS[command]
    text = "at,prompt,output\n" + "".join(f"{n},{n * 7919 % 997 + 1},5\n" for n in range(3000))
    whole = gzip.compress(text.encode())
    for spoilt in (whole[:len(whole) // 2], whole[:-8] + b"\0" * 8):
        (tmp_path / name).write_bytes(spoilt)
        told = call(*words, name).stderr
        assert told.count("\n") == 1 and name in told
        assert "is no event log" in told or "copy or download it again" in told


@pytest.mark.parametrize("named", ["log.jsonl", "log.jsonl.gz"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_log_is_read_whatever_its_name_says_of_its_compression(named, zipped, tmp_path):
    call(*RUN, "--log", tmp_path / "a.jsonl")
    text = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / named).write_bytes(gzip.compress(text) if zipped else text)
    assert call("replay", tmp_path / named).output.startswith("identical: ")


@pytest.mark.parametrize("words", [
    ("replay", "LOG", "--log", "PLACE"), ("compare", "LOG", "--html", "PLACE"),
    ("compare", "LOG", "--json", "PLACE"), ("export", "LOG", "--chrome", "PLACE"),
    ("export", "LOG", "--html", "PLACE"), ("calibrate", "LOG", "--out", "PLACE"),
    (*RUN, "--json", "PLACE"), (*RUN, "--log", "PLACE"), (*RUN, "--html", "PLACE"),
    ("sweep", "LOG", "--out", "PLACE"), ("capacity", "--slo", "ttft_p99=1", "--json", "PLACE")])
def test_a_place_that_cannot_be_written_is_named_before_the_work(words, tmp_path):
    log = tmp_path / "a.jsonl"
    call(*RUN, "--log", log)
    for place, why in ((tmp_path / "no" / "x", "there is no folder"), (tmp_path, "is a folder")):
        result = call(*({"LOG": log, "PLACE": place}.get(word, word) for word in words))
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert why in result.stderr and str(place) in result.stderr and result.stdout == ""


def test_a_sweep_leaves_a_file_alone_that_holds_something_else(tmp_path):
    plan, other = tmp_path / "plan.toml", tmp_path / "notes.jsonl"
    plan.write_text('[base]\npoisson = 1.0\nnum_requests = 2\n[grid]\nseed = [1]\n')
    other.write_text("precious\n")
    result = call("sweep", plan, "--out", other)
    assert result.exit_code == 2 and "stays as it is: choose another --out" in result.stderr
    assert other.read_text() == "precious\n"
    half = tmp_path / "half.jsonl"
    half.write_bytes(b'{"key": "abc", "ra')  # killed while it wrote its first row
    assert call("sweep", plan, "--out", half).exit_code == 0
    assert len(half.read_text().splitlines()) == 1


@pytest.mark.parametrize("error, says", [
    (PermissionError(errno.EACCES, "x", "f"), "f is not open to you: change its permissions"),
    (OSError(errno.ENOSPC, "x", "f"), "f cannot be written, because the disk is full: free some"),
    (OSError(errno.EIO, "x", "f"), "f cannot be used (input/output error): choose another"),
    (NotADirectoryError(errno.ENOTDIR, "x", "f"), "f cannot be: a part of that path is a file"),
    (EOFError("x"), "the file is a gzip file whose end is missing: copy or download it again"),
    (zlib.error("x"), "the file is a damaged gzip file: copy or download it again")])
def test_each_error_of_a_file_has_its_words(error, says):
    assert file_sentence(error).startswith(says)


def test_text_is_read_with_or_without_a_byte_order_mark(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes("größe = 1".encode("utf-8-sig"))
    assert read_text(path, "a file", SpecError) == "größe = 1"


def test_an_error_that_is_none_of_the_parsers_has_no_sentence():
    assert usage_sentence(ValueError("x")) is None


def test_a_log_without_one_whole_step_says_that_nothing_can_be_replayed_and_what_to_do(tmp_path):
    log = tmp_path / "a.jsonl"
    call(*RUN, "--log", log)
    lines = log.read_bytes().splitlines(keepends=True)
    for data in (b"".join(lines[:1]), b"".join(lines[:4]), b"".join(lines[:4]) + b'{"n":'):
        log.write_bytes(data)
        result = call("replay", log)
        assert result.exit_code == 2
        assert "so there is nothing to replay: record the run again" in result.stderr
    log.write_bytes(lines[0] + json.dumps({"n": 0, "t": 0.0, "e": "free", "request": "r0",
                                           "blocks": []}).encode() + b"\n")
    assert "give one that a run wrote with --log" in call("replay", log).stderr


# --------------------------------------------------------------------------- long durations
@pytest.mark.parametrize("words", [
    {"rate": 1e-9, "num_requests": 3}, {"rate": 1e-300, "num_requests": 3},
    {"users": 2, "think": 1e12, "num_requests": 5},
    {"chat_rate": 1.0, "think": 1e12, "num_requests": 2}])
def test_arrivals_beyond_what_a_clock_can_tell_are_refused_with_the_way_out(words):
    with pytest.raises(WorkloadError, match="raise the rate|at most"):
        make_workload(**words)


def test_durations_that_nobody_can_picture_are_told_in_days_and_small_rates_with_3_digits():
    assert [spell(0.5), spell(7199), spell(7200), spell(864_000), spell(9.5e8)] == [
        "0.50 s", "7,199.00 s", "7,200 s (2.0 hours)", "864,000 s (10.0 days)",
        "950,000,000 s (30.1 years)"]
    assert [spell_rate(value, 2) for value in (0.0, 1234.5, 0.98765, 4e-9)] == [
        "0.00", "1,234.50", "0.988", "4e-09"]
    result = call("run", "--poisson", "1e-6", "--num-requests", 3)
    assert result.exit_code == 0 and "days)" in result.output and "e-0" in result.output
