"""The block wall and the block-table lens."""

from lab_app.drawing.memory import draw_wall
from lab_app.viewmodel.lens import lens, slot_text
from lab_app.viewmodel.moment import moment_at
from lab_app.viewmodel.wall import PAGE, cell_text, wall, wall_rows
from tests.lab_app.made_logs import make_log, opened
from tests.lab_app.small_run import A, B, crowded_run, small, small_run


def cells(step, phase="during"):
    return wall(small(step), phase, 5, 4, small_run().palette)


def table(request, step, phase="during"):
    return lens(small(step), phase, request, 4, small_run().palette)


def test_step_0_shares_block_0_fills_2_and_1_slots_and_leaves_2_blocks_clean():
    view = cells(0)
    assert [(cell.kind, cell.owners, cell.used) for cell in view.cells] == [
        ("shared", ("a", "b"), 4), ("used", ("a",), 2), ("used", ("b",), 1), ("clean", (), 0),
        ("clean", (), 0)]
    assert view.cells[0].colours == (A, B) and view.cells[1].fill == 0.5
    assert view.counts == {"used": 2, "shared": 1, "cached": 0, "clean": 2}
    assert view.unused_slots == 5


def test_a_decode_writes_only_the_block_of_its_token():
    assert [cell.block for cell in cells(1).cells if cell.written] == [1, 2]
    assert [cell.block for cell in cells(3).cells if cell.fresh] == [3]


def test_step_7_evicts_blocks_1_and_2_and_takes_them():
    view = cells(7)
    assert [cell.block for cell in view.cells if cell.evicted] == [1, 2]
    assert [cell.block for cell in view.cells if cell.fresh] == [1, 2]
    assert [cell.block for cell in cells(7, "before").cells if cell.kind == "cached"] == [0, 1, 2]


def test_after_the_step_the_blocks_of_finished_requests_are_free_and_their_full_ones_cached():
    kinds = [cell.kind for cell in cells(5, "after").cells]
    assert kinds == ["cached", "cached", "cached", "clean", "clean"]


def test_before_a_step_nothing_is_marked_as_written():
    assert not any(cell.written or cell.fresh for cell in cells(1, "before").cells)


def test_counts_partition_the_pool_in_every_step_and_phase():
    run = crowded_run()
    for step in range(run.num_steps):
        moment = moment_at(run.replayer, step)
        for phase in ("before", "during", "after"):
            view = wall(moment, phase, run.num_blocks, run.block_size, run.palette)
            assert sum(view.counts.values()) == run.num_blocks
            assert sum(cell.kind == "cached" for cell in view.cells) == view.counts["cached"]


def test_free_blocks_of_the_wall_are_those_the_scheduler_counted():
    run = crowded_run()
    for step in range(run.num_steps):
        moment = moment_at(run.replayer, step)
        counts = wall(moment, "during", run.num_blocks, run.block_size, run.palette).counts
        assert counts["cached"] + counts["clean"] == moment.batch["free"]


def test_a_large_pool_is_cut_into_pages_and_follows_the_block_written():
    specs = [{"id": "a", "prompt": list(range(40)), "max_tokens": 250}]
    run = opened(make_log(specs, num_blocks=300, block_size=1, max_model_len=290))
    view = wall(moment_at(run.replayer, 200), "during", 300, 1, run.palette)
    assert (view.page, view.num_pages, view.first, len(view.cells)) == (1, 2, PAGE, 300 - PAGE)
    assert [cell.block for cell in view.cells if cell.written] == [239]
    assert wall(moment_at(run.replayer, 200), "during", 300, 1, run.palette, page=0).first == 0
    assert wall(moment_at(run.replayer, 200), "during", 300, 1, run.palette, page=99).page == 1


def test_hover_text_and_table_say_in_words_what_the_cell_shows():
    view = cells(7)
    assert cell_text(view.cells[1], 4).splitlines() == [
        "block 1: used by one request", "held by c (ref count 1)", "1 of 4 slots filled",
        "in this step: old content evicted, taken, written"]
    assert wall_rows(view)[3] == {
        "block": 3, "state": "used by one request", "held by": "c", "ref count": 1,
        "slots filled": 4, "written now": False, "cached key": "bdffbe7cda26"}


def test_lens_of_b_in_step_0_shares_block_0_and_writes_token_4_into_slot_8():
    view = table("b", 0)
    assert [(row.logical, row.block, row.refs, row.others, row.indexed) for row in view.rows] == [
        (0, 0, 2, ("a",), True), (1, 2, 1, (), False)]
    assert [(slot.position, slot.slot, slot.state, slot.token) for slot in view.rows[1].slots] == [
        (4, 8, "now", 9), (5, 9, "empty", None), (6, 10, "empty", None), (7, 11, "empty", None)]
    assert slot_text(view.rows[1].slots[0], 4) == (
        "token 4 (id 9), prompt: written in this step\nslot 8 = 2 × 4 + 0")


def test_a_token_that_is_known_but_not_computed_has_no_slot_until_its_block_comes():
    rows = table("c", 6).rows  # 8 of 9 prompt tokens fit the budget
    assert (rows[2].block, rows[2].slots[0].state, rows[2].slots[0].slot) == (None, "known", -1)


def test_a_finished_request_holds_no_blocks_and_one_not_arrived_has_no_lens():
    view = table("a", 8)
    assert (view.status, view.rows) == ("finished", [])
    assert view.sentence.endswith("finished (length), so it holds no blocks")
    assert table("nobody", 0) is None


def test_a_simulated_request_without_token_ids_shows_positions_and_output_ids_only():
    run = opened(make_log([{"id": "s", "prompt": 5, "max_tokens": 3}], num_blocks=4,
                            block_size=4, max_model_len=16))
    view = lens(moment_at(run.replayer, 1), "after", "s", 4, run.palette)
    assert [slot.token for row in view.rows for slot in row.slots] == [
        None, None, None, None, None, 5, 6, None]


def test_long_tables_show_their_last_12_blocks():
    run = opened(make_log([{"id": "a", "prompt": [1] * 60, "max_tokens": 2}], num_blocks=40,
                            block_size=2, max_model_len=80))
    view = lens(moment_at(run.replayer, 0), "during", "a", 2, run.palette)
    assert (view.hidden, len(view.rows), view.rows[0].logical) == (18, 12, 18)


def test_the_wall_says_of_which_moment_it_is():
    for phase, when in (("before", "before step 3"), ("during", "while step 3 computes"),
                        ("after", "after step 3")):
        run = small_run()
        view = wall(small(3), phase, run.num_blocks, run.block_size, run.palette)
        assert view.when == when and f"the KV cache {when}" in draw_wall(view, run.palette)
