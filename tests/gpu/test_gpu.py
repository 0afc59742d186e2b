"""run.sh's checks as tests, on a CUDA machine; elsewhere, that it survives its parts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu import check


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, _ in check.FIRST + check.SIDE_BY_SIDE])
def test_on_the_device(name: str):
    record = check.run_part(name, 300, [])
    if "skipped" in record:
        pytest.skip(record["skipped"])
    assert record["ok"], record


@pytest.mark.gpu
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, _ in check.ALONE])
def test_times(name: str):
    record = check.run_part(name, 300, [])
    assert record["ok"] and "error" not in json.dumps(record), record


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name, _ in check.FIRST + check.SIDE_BY_SIDE + check.ALONE])
def test_every_part_can_be_rehearsed_on_a_cpu(name: str):
    pytest.importorskip("triton", reason="Triton is not installed")
    record = check.run_part(name, 300, ["--rehearse"])
    assert record["ok"] or "is not here" in record["skipped"], record


def replace_parts(monkeypatch, source: str) -> None:
    """Let every part run `source` instead; its arguments are the part's."""
    plain = subprocess.run

    def run(command, **options):
        return plain([sys.executable, "-c", source, *command[3:]], **options)
    monkeypatch.setattr(check.subprocess, "run", run)


FATES = """
import json, os, sys, time
name, out = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
if name == "hangs": time.sleep(60)
if name == "dies": os.abort()
if name == "writes_half": open(out, "w").write('{"ok": tr')
if name == "is_well": json.dump({"ok": True, "answer": 42}, open(out, "w"))
"""


@pytest.mark.parametrize(("name", "error"), [
    ("hangs", "took more than 2 s"), ("dies", "exit status -6 without a result"),
    ("writes_half", "JSONDecodeError"), ("is_well", None)])
def test_a_part_that_fails_is_recorded_with_its_error(monkeypatch, name, error):
    replace_parts(monkeypatch, FATES)
    record = check.run_part(name, 2, [])
    if error is None:
        assert record["ok"] and record["answer"] == 42
    else:
        assert not record["ok"] and error in record["error"]


def test_the_file_is_whole_after_every_part_and_names_what_failed(monkeypatch, tmp_path):
    seen = []
    fates = {"environment": {"ok": True}, "one": {"ok": True}, "two": {"ok": False, "error": "x"},
             "three": {"ok": False, "skipped": "flash is not here"}}

    def run_part(name, limit, options):
        if (tmp_path / "gpu.json").exists():
            seen.append(len(json.loads((tmp_path / "gpu.json").read_text())["parts"]))
        return dict(fates[name])
    monkeypatch.setattr(check, "run_part", run_part)
    monkeypatch.setattr(check, "SIDE_BY_SIDE", [("one", 9), ("two", 9)])
    monkeypatch.setattr(check, "ALONE", [("three", 9)])
    assert check.main(["--out", str(tmp_path / "gpu.json"), "--workers", "1"]) == 1
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert seen == [1, 2, 3] and written["failed"] == ["two"] and written["parts"] == fates
    monkeypatch.setitem(fates, "environment", {"ok": False, "skipped": "no CUDA device here",
                                               "no_device": True})
    assert check.main(["--out", str(tmp_path / "gpu.json"), "--workers", "1"]) == 2


def test_no_part_starts_without_time_and_parts_may_end_together(tmp_path):
    assert check.main(["--out", str(tmp_path / "gpu.json"), "--minutes", "0.1"]) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert len(parts) == len(check.FIRST + check.SIDE_BY_SIDE + check.ALONE)
    assert {part["error"] for part in parts.values()} == {"no time left"}
