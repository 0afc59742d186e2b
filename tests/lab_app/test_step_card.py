"""The step card: queues, budget pieces, reasons with their numbers, the four beats."""

from lab_app.viewmodel.moment import moment_at
from lab_app.viewmodel.step_card import queue_rows, step_card, why_rows
from tests.lab_app.made_logs import make_log, opened
from tests.lab_app.small_run import A, crowded_run, small, small_run


def card(step):
    return step_card(small(step), small_run().config, small_run().palette)


def lines(run, step):
    made = step_card(moment_at(run.replayer, step), run.config, run.palette)
    return [(line.request, line.kind, line.text) for line in made.lines]


def test_queues_of_step_0_move_a_and_b_from_nowhere_to_running_and_leave_c_and_d_waiting():
    assert queue_rows(card(0).queues) == [
        {"queue": "waiting", "before": "", "after": "c, d"},
        {"queue": "running", "before": "", "after": "a, b"},
        {"queue": "swapped", "before": "", "after": ""},
        {"queue": "finished", "before": "", "after": ""}]


def test_step_5_finishes_a_and_b_and_a_chip_that_stays_is_not_marked_as_moved():
    waiting, running, _, finished = card(5).queues
    assert [chip.request for chip in finished.after] == ["a", "b"]
    assert [(chip.request, chip.moved) for chip in waiting.after] == [("c", False), ("d", False)]
    assert running.after == []


def test_budget_of_step_0_is_6_prefill_tokens_of_a_and_1_of_b_with_4_more_from_the_cache():
    made = card(0)
    assert [(piece.request, piece.kind, piece.tokens) for piece in made.pieces] == [
        ("a", "prefill", 6), ("b", "prefill", 1)]
    assert [(piece.request, piece.tokens) for piece in made.cached] == [("b", 4)]
    assert (made.spent, made.budget, made.pieces[0].colour) == (7, 8, A)


def test_rows_past_the_prompt_are_decodes():
    assert [(piece.kind, piece.text) for piece in card(1).pieces] == [
        ("decode", "a decodes: computes token 6, samples token 7"),
        ("decode", "b decodes: computes token 5, samples token 6")]


def test_reasons_of_step_0_name_the_blocks_that_c_lacks_and_the_head_that_d_waits_behind():
    assert lines(small_run(), 0) == [
        ("c", "out", "needs 3 blocks, 2 free"), ("d", "out", "behind c"),
        ("a", "in", "admitted: needs 2 blocks, 5 free"),
        ("b", "in", "admitted: needs 1 block, 3 free; 4 tokens found in the cache")]


def test_a_spent_budget_is_the_reason_of_step_6():
    assert lines(small_run(), 6)[0] == ("d", "out", "token budget spent (8 of 8 tokens)")


def test_everyone_is_scheduled_in_step_8():
    assert lines(small_run(), 8) == []


def test_the_four_beats_of_step_7():
    assert card(7).beats == [
        ("decide", "2 prefill chunks"), ("place", "2 blocks taken, 2 blocks evicted"),
        ("compute", "4 tokens in 10 ms"), ("commit", "2 tokens sampled")]


def test_a_preempting_step_says_for_whom_and_what_is_lost_and_that_nobody_is_admitted():
    run = crowded_run()
    assert lines(run, run.timeline.marks["preempt"][0]) == [
        ("r6", "out", "nobody is admitted in a step that preempts (r5)"),
        ("r5", "lost", "preempted: r0 needs 1 block, 0 free; 29 computed tokens lost")]


def test_taken_seats_are_named_with_the_setting():
    run = opened(make_log([{"id": name, "prompt": [1, 2], "max_tokens": 3} for name in "xyz"],
                            num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2))
    assert lines(run, 1) == [("z", "out", "all 2 seats taken (max_num_seqs = 2)")]


def test_static_batching_and_prefill_first_have_their_own_reasons():
    late = [{"id": "x", "prompt": [1, 2], "max_tokens": 4},
            {"id": "y", "prompt": [3, 4], "max_tokens": 4, "at": 0.01}]
    room = {"num_blocks": 8, "block_size": 4, "max_model_len": 16}
    static = opened(make_log(late, batching="static", **room))
    assert lines(static, 1) == [("y", "out", "the running batch must finish first")]
    first = opened(make_log(late, batching="prefill_first", **room))
    assert lines(first, 1)[0] == ("x", "out", "its decode waits: this step is for prefill")


def test_reserving_admission_says_what_it_must_hold_back():
    run = opened(make_log(
        [{"id": "x", "prompt": [1, 2], "max_tokens": 9},
         {"id": "y", "prompt": [3], "max_tokens": 9}],
        num_blocks=4, block_size=4, max_model_len=16, batching="reserve"))
    assert lines(run, 0)[0] == (
        "y", "out", "must reserve 3 blocks up to its limit, 1 not promised")


def test_swapping_is_told_on_the_way_out_and_on_the_way_back():
    run = opened(make_log(
        [{"id": "x", "prompt": [1] * 4, "max_tokens": 9}, {"id": "y", "prompt": [2] * 4,
                                                           "max_tokens": 9}],
        num_blocks=4, block_size=4, max_model_len=16, preemption="swap", num_cpu_blocks=8))
    out, back = run.timeline.marks["swap"][:2]
    assert lines(run, out)[-1][2].endswith("computed tokens saved to CPU memory")
    assert ("y", "in", "swapped in: 2 blocks copied back") in lines(run, back)


def test_a_further_sample_waits_for_the_prompt_it_shares():
    run = opened(make_log(
        [{"id": "x", "prompt": [1] * 6, "max_tokens": 2},
         {"id": "x.1", "prompt": [1] * 6, "max_tokens": 2, "parent": "x"}],
        num_blocks=8, block_size=4, max_model_len=16))
    assert ("x.1", "out", "waits for the prompt it is a sample of") in lines(run, 0)
    assert any("found in its parent's blocks" in text for _, _, text in lines(run, 1))


def test_more_than_12_waiting_requests_are_counted_not_listed():
    run = opened(make_log([{"id": f"q{n}", "prompt": [1, 2], "max_tokens": 3} for n in range(40)],
                            num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1))
    made = step_card(moment_at(run.replayer, 0), run.config, run.palette)
    held = [line for line in made.lines if line.kind == "out"]
    assert (len(held), made.more_behind) == (12, 27)  # q0 runs
    assert (len(made.queues[0].after), made.queues[0].more_after) == (14, 25)


def test_every_reason_in_the_table_comes_with_its_rule():
    assert all(row["rule"] for row in why_rows(card(0).lines))


def test_every_step_of_a_crowded_run_has_a_card_whose_pieces_sum_up_to_the_batch():
    run = crowded_run()
    for step in range(run.num_steps):
        moment = moment_at(run.replayer, step)
        made = step_card(moment, run.config, run.palette)
        assert made.spent == sum(moment.batch["counts"]) <= made.budget
        waiting = set(moment.during.waiting)
        assert waiting == {line.request for line in made.lines
                           if line.request in waiting} or made.more_behind
