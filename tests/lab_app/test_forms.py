"""What the Simulate and Run forms become, and what they refuse."""

import pytest

from engine.core.errors import TandemError
from lab_app.viewmodel.runform import RunForm, Transcript, engine_settings, read_prompts
from lab_app.viewmodel.simulation import (
    PRESETS,
    Form,
    build_workload,
    history_row,
    latency_points,
    latency_table,
    parse_list,
    settings,
    tiles,
)
from simulator.api import simulate


def test_a_list_takes_blanks_and_commas_and_skips_empty_lines():
    assert parse_list("0 10 5\n\n0.5, 20, 6\n") == [(0.0, 10, 5), (0.5, 20, 6)]


@pytest.mark.parametrize(("text", "says"), [
    ("0 10 5\n1 2", "Line 2 of the list is '1 2': it must have three numbers"),
    ("a b c", "Line 1"), ("", "The list has 0 requests"), ("0 -5 3", "prompt -5")])
def test_a_bad_list_is_refused_in_one_sentence(text, says):
    with pytest.raises(TandemError) as refused:
        build_workload(Form(source="list", listed=text))
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("form", [
    Form(inputs="-5"), Form(outputs="lots"), Form(rate=-1.0), Form(count=0), Form(count=6000)])
def test_numbers_that_cannot_be_are_refused(form):
    with pytest.raises(TandemError):
        build_workload(form)


def test_settings_leave_the_pool_to_the_simulator_when_blocks_is_0():
    assert "num_blocks" not in settings(Form(num_blocks=0))
    assert settings(Form(num_blocks=64))["num_blocks"] == 64
    assert settings(Form(preemption="swap", num_blocks=64))["num_cpu_blocks"] == 64


def test_the_first_preset_preempts_and_its_tables_have_the_numbers():
    form = Form(count=24)
    result = simulate(build_workload(form), form.model, form.hardware, settings(form),
                      keep_events=True)
    assert result.metrics.completed == 24 and result.metrics.preemptions > 0
    assert [row["ms"] for row in latency_table(result.metrics)] == ["TTFT", "TPOT", "ITL", "E2EL"]
    assert tiles(result.metrics)[0][:2] == ("Completed", "24 of 24")
    assert history_row(form, result, "x")["preemptions"] == result.metrics.preemptions
    points = latency_points(result)
    assert len(points) == 24 and all(0 < point["ttft"] <= point["e2el"] for point in points)


def test_every_preset_is_a_form():
    for explained, fields in PRESETS.values():
        assert explained.endswith(".") and len(build_workload(Form(**fields))) == 48


def test_prompts_are_lines_as_often_as_asked():
    assert read_prompts(RunForm(prompts=" a \n\nb", copies=2)) == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("prompts", "copies", "says"), [
    (" \n", 1, "There is no prompt"), ("x\n" * 10, 7, "These are 70 prompts")])
def test_no_prompt_and_too_many_prompts_are_refused(prompts, copies, says):
    with pytest.raises(TandemError, match=says):
        read_prompts(RunForm(prompts=prompts, copies=copies))


def test_the_engine_may_let_a_request_grow_to_what_the_pool_holds():
    made = engine_settings(RunForm(num_blocks=20, block_size=8))
    assert (made["max_model_len"], made["num_kvcache_blocks"]) == (160, 20)


def test_a_transcript_says_how_it_ended():
    assert Transcript("p", tokens=1).state == "running, 1 token"
    cut = Transcript("p", tokens=4, finish_reason="length")
    assert cut.state == "stopped at max_tokens, 4 tokens"
    assert Transcript("p", error="the step failed").state == "the step failed"
