"""The compiled core decides, prices and writes what the interpreted one does, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulator import compiled

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("compiled_runs.py")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with compiled modules in it, made here, in half a minute."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CACHE", str(folder))
        try:
            compiled.build(optimize=0)
        except compiled.CannotCompile as error:
            if "needs mypy" in str(error) or "a C compiler" in str(error):
                pytest.skip(str(error))
            raise
    return folder


def python(cache, switch, *words):
    environment = os.environ | {"TANDEM_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TANDEM_COMPILED", None)
    if switch:
        environment["TANDEM_COMPILED"] = switch
    return subprocess.run([sys.executable, *map(str, words)], env=environment, text=True,
                          capture_output=True, timeout=300, cwd=ROOT)


def test_runs_of_every_kind_are_the_same_to_the_last_byte_of_their_logs(cache):
    plain, fast = (json.loads(python(cache, switch, RUNS).stdout) for switch in "01")
    assert (plain["compiled"], fast["compiled"]) == (False, True)
    assert plain["scheduler"].endswith(".py") and fast["scheduler"].startswith(str(cache))
    assert len(plain["runs"]) > 18 and plain["runs"]["mixed"] != plain["runs"]["static"]
    for name, run in plain["runs"].items():
        assert fast["runs"][name] == run, name


def test_the_command_line_uses_them_in_its_worker_processes_too(cache, tmp_path):
    for switch, word in (("", "compiled"), ("0", "interpreted")):
        shown = python(cache, switch, "-m", "simulator", "bench", "--traces", tmp_path)
        assert shown.returncode == 0 and f"\n{word}" in shown.stdout, shown.stderr
    plan = tmp_path / "plan.toml"
    plan.write_text('[base]\npoisson = 5\nnum_requests = 40\ninput_len = "50:400"\n'
                    'output_len = "1:50"\nmodel = "smollm2"\nhardware = "l4"\n'
                    '[grid]\nbatching = ["mixed", "static"]\n')
    rows = []
    for switch in ("", "0"):
        out = tmp_path / f"rows{switch}.jsonl"
        done = python(cache, switch, "-v", "-m", "simulator", "sweep", plan, "--out", out)
        assert done.returncode == 0, done.stderr[-2000:]
        # The sweep's own process and a worker at least; -v goes to the workers, too.
        loaded = done.stderr.count(f"'engine.core.scheduler' loaded from '{cache}")
        assert (loaded >= 2) if switch == "" else (loaded == 0)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        for row in found:
            assert row.pop("simulation_seconds") > 0
        rows.append(sorted(found, key=str))
    assert rows[0] == rows[1] and len(rows[0]) == 2


def test_who_imports_the_simulator_gets_the_files_unless_asked_otherwise(cache):
    shows = "import simulator.api; from simulator import compiled; print(compiled.in_use())"
    assert python(cache, "", "-c", shows).stdout == "False\n"
    assert python(cache, "1", "-c", shows).stdout == "True\n"
    late = "import engine.core; " + shows  # the classes are there: half of each would not do
    assert python(cache, "1", "-c", late).stdout == "False\n"


def test_an_edited_file_is_interpreted(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_CACHE", str(cache))
    assert compiled.place().is_dir()
    for name in compiled.MODULES:
        copy = tmp_path / Path(*name.split(".")).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / copy.relative_to(tmp_path)).read_bytes())
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    assert compiled.place().is_dir()
    copy.write_bytes(copy.read_bytes() + b"\n# edited\n")
    assert not compiled.place().exists()


def test_damaged_modules_are_left_alone_and_told_and_made_anew(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    shutil.copytree(cache / "compiled", tmp_path / "compiled")
    replay = ("-m", "simulator", "replay", ROOT / "lab_app" / "data" / "tiny_crowded.jsonl.gz")
    whole = python(tmp_path, "", *replay)
    assert whole.stdout.startswith("identical") and whole.stderr == ""
    library = next(compiled.place().glob("*__mypyc*"))
    for damage in (lambda: os.truncate(library, library.stat().st_size // 2), library.unlink):
        damage()
        done = python(tmp_path, "", *replay)
        assert done.returncode == 0 and done.stdout == whole.stdout
        assert "are damaged" in done.stderr and done.stderr.count("\n") == 1
    assert python(tmp_path, "0", *replay).stderr == ""
    monkeypatch.setattr(compiled, "_run", lambda work, optimize: shutil.copytree(
        cache / "compiled" / compiled.place().name, work / "made"))  # half a minute, known to work
    assert compiled.build() and not compiled.build()
    assert python(tmp_path, "", *replay).stderr == ""
    assert [path.name for path in (tmp_path / "compiled").iterdir()] == [compiled.place().name]


def test_without_a_compiler_or_mypy_it_says_so_and_leaves_nothing(monkeypatch, tmp_path):
    words = ("-m", "simulator", "compile")
    monkeypatch.setenv("CC", "/no/such/compiler")
    lacking = python(tmp_path, "", *words)
    assert lacking.returncode == 2 and lacking.stdout == ""
    assert "compiling failed (" in lacking.stderr and lacking.stderr.count("\n") == 1
    assert "/no/such/compiler" in lacking.stderr
    (tmp_path / "mypyc.py").write_text("raise ModuleNotFoundError('No module named mypyc')\n")
    environment = os.environ | {"TANDEM_CACHE": str(tmp_path),
                                "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    lacking = subprocess.run([sys.executable, *words], env=environment, text=True,
                             capture_output=True, timeout=300, cwd=ROOT)
    assert lacking.returncode == 2 and "pip install -e '.[fast]'" in lacking.stderr
    assert list((tmp_path / "compiled").iterdir()) == []
