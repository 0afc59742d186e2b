"""What a student and an instructor type: results, exit codes, and mistakes in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from exercises import __main__ as cli
from exercises.grader import zoo
from exercises.grader.manifest import load_exercise
from exercises.grader.text import isolation_sentence

E02 = load_exercise("e02")


@pytest.fixture
def lab(tmp_path, monkeypatch, capsys):
    """`lab(*arguments)` runs a command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["exercises", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr()
        return end.value.code or 0, out.out, out.err

    return run


def put_solution(folder):
    (folder / "work").mkdir(exist_ok=True)
    (folder / "work" / "e02.py").write_text((E02.folder / "solution.py").read_text())


def test_start_puts_the_starter_there_and_never_overwrites_a_file(lab, tmp_path):
    assert lab("start", "e02")[0] == 0
    file = tmp_path / "work" / "e02.py"
    assert file.read_text() == (E02.folder / "starter.py").read_text()
    file.write_text("mine = 1\n")
    code, out, _ = lab("start", "e02")
    assert code == 0 and "stays as it is" in out and file.read_text() == "mine = 1\n"


def test_check_of_the_starter_names_the_rule_to_write_and_exits_1(lab):
    lab("start", "e02")
    code, out, _ = lab("check", "e02")
    assert code == 1 and "E02: write BlockPool.__init__ (rule R1)" in out
    assert "0 of 12 tests" in out and "isolation" in out and "points" not in out


def test_check_of_a_right_file_exits_0(lab, tmp_path):
    put_solution(tmp_path)
    code, out, _ = lab("check", "e02")
    assert code == 0 and "all right so far" in out


def test_list_shows_the_exercise_and_the_best_grade(lab, tmp_path):
    assert "not started" in lab("list")[1]
    put_solution(tmp_path)
    (tmp_path / "work" / "progress.json").write_text('{"e02": {"best": 65.56}}')
    assert "best grade 65.56 of 100" in lab("list")[1]


def test_hints_come_one_at_a_time_and_stop_at_the_last(lab):
    lab("start", "e02")
    heads = [lab("hint", "e02")[1].split("  ")[0] for _ in range(4)]
    assert heads == ["hint 1 of 3", "hint 2 of 3", "hint 3 of 3", "hint 3 of 3"]
    assert lab("hint", "e02", "1")[1].startswith("hint 1 of 3")


def test_a_grade_prints_the_commitment_first_and_the_seed_last(lab, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "e02.py").write_text((E02.folder / "chaffs" / "lifo.py").read_text())
    code, out, _ = lab("grade", "e02", "--seed", "five", "--json", "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert code == 1 and report["seed"] == "five" and report["status"] == "fail"
    assert out.index(f"seed commitment {report['seed_commitment']}") < out.index("seed five")
    assert "65.56 of 100 points" in out
    assert json.loads((tmp_path / "work" / "progress.json").read_text())["e02"]["best"] == 65.56


@pytest.mark.parametrize("format", ["gradescope", "exercism", "classroom"])
def test_other_formats_stand_alone_on_standard_output_and_exit_0(lab, format):
    lab("start", "e02")
    code, out, err = lab("grade", "e02", "--format", format)
    assert code == 0 and "seed commitment" in err
    if format != "classroom":
        assert json.loads(out)["tests"]


@pytest.mark.parametrize("arguments, sentence", [
    (("check", "e99"), "there is no exercise 'e99'; there are: e02"),
    (("check", "e02"), "work/e02.py does not exist: python -m exercises start e02"),
    (("hint", "e02", "9"), "e02 has hints 1 to 3, not 9"),
    (("grade", "e02", "--format", "xml"), "there is no format 'xml'; there are: native,"),
])
def test_a_mistake_is_one_sentence_and_exit_code_2(lab, arguments, sentence):
    code, out, err = lab(*arguments)
    assert code == 2 and err.startswith(sentence) and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("arguments, sentence", [
    (("--foo",), "No such option: --foo"), (("chek", "e02"), "No such command 'chek'"),
    (("check",), "Missing argument 'EXERCISE'"), (("hint", "e02", "x"), "Invalid value for"),
    (("list", "stray"), "unexpected extra argument"),
    (("grade", "e02", "--sead", "1"), "No such option: --sead")])
def test_what_the_command_line_does_not_know_is_one_sentence_with_the_way_to_help(
        lab, arguments, sentence):
    code, out, err = lab(*arguments)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert sentence in err and "--help lists what there is" in err


@pytest.mark.parametrize("command", ["check", "grade", "watch"])
@pytest.mark.parametrize("kind, sentence", [
    ("folder", "is a folder: name a file in it"), ("latin", "is not UTF-8 text (a byte 0xe9"),
    ("binary", "is a binary file, not text"), ("missing", "does not exist: python -m exercises"),
    ("under", "a part of that path is a file, not a folder")])
def test_a_file_that_cannot_be_read_is_one_sentence_without_the_librarys_words(
        lab, tmp_path, command, kind, sentence):
    path = tmp_path / "my.py"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"latin": "x = 'é'".encode("latin-1"), "binary": b"\x00\xff" * 40,
                          "under": b"x = 1"}[kind])
    given = path / "e02.py" if kind == "under" else path
    code, out, err = lab(command, "e02", "--file", str(given))
    assert code == 2 and err.count("\n") == 1 and err.startswith(str(given)) and sentence in err
    assert "Errno" not in err and "codec" not in err


def test_places_that_cannot_be_written_are_named_before_anything_is_graded(lab, tmp_path):
    put_solution(tmp_path)
    for place, sentence in (("nowhere/r.json", "there is no folder nowhere; create it first"),
                            ("work", "work is a folder: name a file in it")):
        code, out, err = lab("grade", "e02", "--json", place)
        assert code == 2 and sentence in err and "seed" not in out
    (tmp_path / "plain").write_text("")
    code, _, err = lab("start", "e02", "--work", "plain")
    assert (code, err) == (2, "plain is in the way: remove it, or choose another folder with "
                              "--work\n")
    code, _, err = lab("release", "--out", "plain")
    assert code == 2 and "a part of that path is a file" in err


def test_a_file_that_does_not_load_was_isolated_all_the_same(lab, tmp_path):
    lab("start", "e02")
    running = lab("check", "e02")[1].splitlines()[-1].split(" · ")[0]
    (tmp_path / "work" / "e02.py").write_text("broken(")
    assert lab("check", "e02")[1].splitlines()[-1].split(" · ")[0] == running
    assert running.startswith("isolation ") and "none" not in running


@pytest.mark.parametrize("isolation, sentence", [
    ("pidns+netns+rlimits+uid+landlock+seccomp",
     "isolation pidns+netns+rlimits+uid+landlock+seccomp"),
    ("rlimits+landlock", "isolation rlimits+landlock, without pidns, netns, uid, seccomp on this "
     "machine: enough for your own work, not for grading others' (exercises/README.md says what "
     "each lock does)"),
    ("none", "isolation none, because nothing of your file was run")])
def test_isolation_is_told_in_words(isolation, sentence):
    assert isolation_sentence(isolation) == sentence


def test_a_report_is_not_written_through_a_symbolic_link(lab, tmp_path):
    lab("start", "e02")
    (tmp_path / "target").write_text("precious")
    (tmp_path / "r.json").symlink_to(tmp_path / "target")
    code, _, err = lab("grade", "e02", "--json", "r.json")
    assert code == 2 and "symbolic link" in err and (tmp_path / "target").read_text() == "precious"


def test_watch_checks_again_after_a_save(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    file = work / "e02.py"
    file.write_text("broken(")
    process = subprocess.Popen(
        [sys.executable, "-m", "exercises", "watch", "e02", "--work", str(work)],
        cwd=zoo.LAB, stdout=subprocess.PIPE, text=True)
    try:
        assert any("SyntaxError" in line for line in process.stdout)
        put_solution(tmp_path)
        assert any("all right so far" in line for line in process.stdout)
    finally:
        process.kill()
        process.communicate()


def test_the_student_bundle_has_no_secret_file_and_checks_a_file(lab, tmp_path):
    code, out, _ = lab("release", "--out", "dist")
    assert code == 0 and "no solution among them" in out
    files = {path.name for path in (tmp_path / "dist").rglob("*") if path.is_file()}
    assert {"starter.py", "visible.py", "counted.py", "README.md", "worker.py"} <= files
    assert not files & {"solution.py", "hidden.py", "integrate.py", "lifo.py", "verify.py",
                        "a05_equal_to_all.py", "alt_linked_list.py"}
    assert lab("release", "--out", "dist")[0] == 2
    put_solution(tmp_path)
    path = [str(tmp_path / "dist"), str(zoo.LAB), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run([sys.executable, "-m", "exercises", "check", "e02"], env=environment,
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not part of this copy of the lab" in done.stdout and "12 of 12 tests" in done.stdout
