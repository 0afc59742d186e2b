"""Every page under AppTest: it draws, its buttons do what they say, mistakes give one sentence."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import lab_app
from lab_app.parts import engine
from tests.lab_app.made_logs import crowded

APP = str(Path(lab_app.__file__).parent / "streamlit_app.py")
REPLAY = "views/replay.py"


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def app():
    return AppTest.from_file(APP, default_timeout=60).run()


def replay(**params):
    """The replay page as a link opens it."""
    test = AppTest.from_file(APP, default_timeout=60)
    test.switch_page(REPLAY)
    for name, value in params.items():
        test.query_params[name] = value
    test.run()
    assert not test.exception
    return test


def url(test, name):
    """A parameter of the URL; AppTest gives a string or a list of one."""
    value = test.query_params[name]
    return value if isinstance(value, str) else value[0]


def at_step(test):
    return test.slider(key="slider").value


def test_start_explains_the_lab_and_draws_three_suggestions():
    test = app()
    assert not test.exception and not test.error
    assert "see an inference engine think" in test.title[0].value


def test_replay_opens_the_shipped_log_at_step_0_and_the_url_says_so():
    test = replay()
    assert at_step(test) == 0
    assert url(test, "log") == "shipped/tiny_crowded.jsonl.gz"
    assert url(test, "step") == "0"


def test_buttons_step_and_jump_and_the_url_follows():
    test = replay()
    test.button(key="forward").click().run()
    assert at_step(test) == 1 and url(test, "step") == "1"
    test.button(key="next_preempt").click().run()
    first = at_step(test)
    assert first > 1
    test.button(key="back").click().run()
    assert at_step(test) == first - 1
    test.button(key="last").click().run()
    assert test.button(key="forward").disabled and test.button(key="next_hit").disabled
    test.button(key="first").click().run()
    assert at_step(test) == 0 and test.button(key="back").disabled


def test_the_slider_and_the_phase_move_the_place():
    test = replay()
    test.slider(key="slider").set_value(40).run()
    assert url(test, "step") == "40"
    test.segmented_control(key="phase").set_value("after").run()
    assert url(test, "phase") == "after" and at_step(test) == 40


def test_a_link_opens_its_step_and_request():
    test = replay(log="shipped/tiny_crowded.jsonl.gz", step="17", request="r3")
    assert at_step(test) == 17 and url(test, "request") == "r3"


@pytest.mark.parametrize(("params", "says"), [
    ({"step": "100000"}, "this log has steps 0 to 107"), ({"step": "x"}, "no whole number"),
    ({"log": "runs/gone.jsonl"}, "which is not here"), ({"request": "zz"}, "not in this log"),
    ({"log": "shipped/../../etc/passwd"}, "which is not here")])
def test_a_wrong_link_gives_one_sentence_and_opens_the_shipped_log(params, says):
    test = replay(**params)
    assert [says in warning.value for warning in test.warning] == [True]
    assert url(test, "log") == "shipped/tiny_crowded.jsonl.gz"


def test_a_truncated_log_in_the_runs_folder_opens_up_to_the_damage(runs):
    runs.mkdir()
    path = runs / "cut.jsonl"
    crowded(target=path)
    path.write_bytes(path.read_bytes()[:40_000])
    test = replay(log="runs/cut.jsonl", step="3")
    assert test.warning[0].value.startswith("cut.jsonl is damaged at line")
    assert at_step(test) == 3


@pytest.mark.parametrize(("name", "content"), [
    ("junk.jsonl", b"hello\n"), ("junk.jsonl.gz", b"\x1f\x8bnot gzip"), ("empty.jsonl", b""),
    ("header.jsonl", b'{"tandem":1,"schema":1}\n'), ("old.jsonl", b'{"tandem":1,"schema":99}\n')])
def test_a_file_that_is_no_log_gives_one_sentence(runs, name, content):
    runs.mkdir()
    (runs / name).write_bytes(content)
    test = replay(log=f"runs/{name}")
    assert len(test.error) == 1 and test.error[0].value.endswith(".")
    assert str(runs) not in test.error[0].value


def test_tables_are_there_for_those_who_cannot_see_the_wall():
    test = replay(step="24")
    test.session_state["tables"] = True
    test.run()
    assert not test.exception
    blocks = test.dataframe[2].value
    assert list(blocks["block"]) == list(range(24)) and "held by" in blocks


def test_simulate_runs_shows_its_table_and_leaves_a_log_that_replay_opens(runs):
    test = app()
    test.switch_page("views/simulate.py").run()
    test.number_input(key="sim_count").set_value(12)
    test.button[0].click().run()
    assert not test.exception and not test.error
    assert list(test.dataframe[0].value["ms"]) == ["TTFT", "TPOT", "ITL", "E2EL"]
    path, = runs.glob("sim_*.jsonl")
    opened = replay(log=f"runs/{path.name}", step="5")
    assert at_step(opened) == 5


@pytest.mark.parametrize(("key", "value", "says"), [
    ("sim_inputs", "-4", "prompt lengths '-4'"), ("sim_outputs", "x:y", "output lengths 'x:y'")])
def test_simulate_refuses_bad_lengths_in_one_sentence_and_leaves_no_log(runs, key, value, says):
    test = app()
    test.switch_page("views/simulate.py").run()
    test.text_input(key=key).set_value(value)
    test.button[0].click().run()
    assert not test.exception and says in test.error[0].value
    assert not list(runs.glob("*")) if runs.exists() else True


def test_simulate_refuses_a_model_that_does_not_fit_and_leaves_no_log(runs):
    test = app()
    test.switch_page("views/simulate.py").run()
    test.selectbox(key="sim_model").set_value("llama-3.1-70b")
    test.number_input(key="sim_num_blocks").set_value(0)
    test.button[0].click().run()
    assert not test.exception and len(test.error) == 1
    assert not list(runs.glob("*"))


def test_run_answers_with_the_tiny_model_and_leaves_a_log_that_preempts(runs):
    pytest.importorskip("torch")
    test = app()
    test.switch_page("views/run.py").run()
    test.button[0].click().run(timeout=120)
    assert not test.exception and not test.error
    assert "The capital of France is Paris." in [block.value for block in test.code]
    path, = runs.glob("run_*.jsonl")
    assert '"e":"preempt"' in path.read_text()


def test_run_refuses_a_prompt_larger_than_the_pool_and_an_empty_list(runs):
    pytest.importorskip("torch")
    test = app()
    test.switch_page("views/run.py").run()
    test.text_area(key="run_prompts").set_value("word " * 400)
    test.button[0].click().run(timeout=120)
    assert not test.exception and "max_model_len is 160" in test.error[0].value
    test.text_area(key="run_prompts").set_value(" ")
    test.button[0].click().run()
    assert test.error[0].value.startswith("There is no prompt")
    assert not list(runs.glob("*"))


def test_run_without_torch_says_what_to_do(monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    test = app()
    test.switch_page("views/run.py").run()
    assert not test.exception and "needs PyTorch" in test.info[0].value
