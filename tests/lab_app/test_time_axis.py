"""Timeline columns, jumps, latencies, lanes and the metrics strip."""

from lab_app.viewmodel.lanes import MAX_LANES, lanes
from lab_app.viewmodel.metrics import POINTS, latency_rows, latency_texts, strip, values_at
from tests.lab_app.made_logs import make_log, opened
from tests.lab_app.small_run import crowded_run, small_run

LINE = small_run().timeline


def parts(view, request):
    lane = next(lane for lane in view.lanes if lane.request == request)
    return [(part.kind, part.first, part.last) for part in lane.segments]


def test_prefill_and_decode_tokens_of_every_step():
    assert LINE.prefill == [7, 0, 0, 0, 0, 0, 8, 4, 0]
    assert LINE.decode == [0, 2, 2, 2, 2, 2, 0, 0, 2]


def test_queue_lengths_and_free_blocks_are_those_of_the_batch_events():
    assert LINE.waiting == [2, 2, 2, 2, 2, 2, 1, 0, 0]
    assert LINE.running == [2, 2, 2, 2, 2, 2, 1, 2, 2]
    assert LINE.free == [2, 2, 2, 1, 0, 0, 3, 1, 1]


def test_next_step_finds_the_next_mark_after_the_cursor_and_none_after_the_last():
    assert (LINE.next_step("hit", -1), LINE.next_step("hit", 0)) == (0, None)
    assert (LINE.next_step("finish", 0), LINE.next_step("finish", 5)) == (5, 8)
    assert (LINE.next_step("evict", 3), LINE.next_step("preempt", 0)) == (7, None)


def test_marks_of_preemptions_are_the_steps_that_hold_a_preempt_event():
    run = crowded_run()
    expected = [step for step in range(run.num_steps)
                if any(event["e"] == "preempt" for event in run.replayer.events_of(step))]
    assert run.timeline.marks["preempt"] == expected and len(expected) == 6
    assert run.timeline.preempted[-1] == 6


def test_latencies_count_from_arrival_to_tokens():
    entry = LINE.latencies[0]
    assert (entry.request, entry.step, entry.ttft, entry.e2e) == ("a", 5, 0.01, 0.06)
    assert abs(entry.tpot - 0.01) < 1e-12  # 6 tokens: 5 gaps in 50 ms
    assert latency_rows(LINE)[2] == {"request": "c", "finished in step": 8, "TTFT ms": 80.0,
                                     "TPOT ms": 10.0, "E2E ms": 90.0}


def test_the_figures_at_the_cursor_count_what_has_finished_by_then():
    assert [entry.request for entry in LINE.latencies_until(7)] == ["a", "b"]
    assert [(name, value) for name, value, _ in latency_texts(LINE, 8)] == [
        ("Finished", "4"), ("TTFT", "45 ms"), ("TPOT", "10 ms"), ("Preemptions", "0")]
    assert [value for _, value, _ in latency_texts(LINE, 0)] == ["0", "–", "–", "0"]


def test_values_at_a_step():
    assert values_at(LINE, 3, 5) == {"kv": "80", "running": "2", "waiting": "2", "tokens": "2",
                                     "ms": "10"}


def test_a_short_run_keeps_every_step_in_the_strip():
    view = strip(LINE, 5)
    assert view.stride == 1
    curves = {curve.name: curve for curve in view.curves}
    assert curves["kv"].values == (60, 60, 60, 80, 100, 100, 40, 80, 80)
    assert curves["tokens"].second == tuple(LINE.prefill) and curves["tokens"].top == 8


def test_a_long_run_is_thinned_to_at_most_240_points_that_keep_the_peaks():
    run = opened(make_log([{"id": "a", "prompt": [1] * 9, "max_tokens": 700}], num_blocks=200,
                            block_size=4, max_model_len=800))
    curves = {curve.name: curve for curve in run.strip.curves}
    assert run.strip.stride == 3 and len(curves["kv"].values) == -(-700 // 3) <= POINTS
    assert max(curves["kv"].values) == 100 * 177 / 200  # 708 tokens in blocks of 4


def test_lanes_of_the_small_run_from_waiting_to_finish():
    view = lanes(small_run().replayer, 4, small_run().palette)
    assert (view.first, view.last, [lane.request for lane in view.lanes]) == (0, 8, list("abcd"))
    assert parts(view, "a") == [("prefill", 0, 0), ("decode", 1, 5)]
    assert parts(view, "d") == [("wait", 0, 6), ("prefill", 7, 7), ("decode", 8, 8)]
    marks = {lane.request: [(step, kind) for step, kind, _ in lane.marks] for lane in view.lanes}
    assert marks["a"] == [(0, "first"), (5, "finish")]
    assert marks["b"] == [(0, "hit"), (0, "first"), (5, "finish")]


def test_a_preempted_request_waits_again_until_it_prefills_again():
    run = crowded_run()
    view = lanes(run.replayer, run.timeline.marks["preempt"][0], run.palette)
    assert parts(view, "r5")[1:4] == [("decode", 16, 17), ("lost", 18, 23), ("prefill", 24, 24)]


def test_a_window_in_the_middle_knows_what_went_before_it():
    run = crowded_run()
    whole = lanes(run.replayer, 60, run.palette, window=run.num_steps)
    cut = lanes(run.replayer, 60, run.palette, window=16)
    assert (cut.first, cut.last, cut.cursor) == (52, 67, 60)
    for lane in cut.lanes:
        clipped = [(kind, max(first, cut.first), min(last, cut.last))
                   for kind, first, last in parts(whole, lane.request)
                   if last >= cut.first and first <= cut.last]
        assert parts(cut, lane.request) == clipped


def test_too_many_requests_keep_the_selected_one_and_those_that_compute():
    run = opened(make_log([{"id": f"q{n}", "prompt": [1, 2], "max_tokens": 3} for n in range(60)],
                            num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2))
    view = lanes(run.replayer, 0, run.palette, selected="q59", window=4)
    names = [lane.request for lane in view.lanes]
    assert (len(names), view.hidden) == (MAX_LANES, 60 - MAX_LANES)
    assert names[:2] == ["q0", "q1"] and names[-1] == "q59"
