"""Opening logs, links to a place, and where logs are kept."""

import gzip
import json
from datetime import datetime

import pytest

from engine.core.errors import LogError
from engine.core.events import LoadedLog
from lab_app.store import SHIPPED, catalog, find, new_log, save_upload
from lab_app.viewmodel.address import Address, as_params, parse_address
from lab_app.viewmodel.loglines import LogLines
from lab_app.viewmodel.palette import HUES, ink_on
from lab_app.viewmodel.picture import picture
from lab_app.viewmodel.run import facts, open_run
from lab_app.viewmodel.suggest import suggest
from tests.lab_app.made_logs import crowded, opened
from tests.lab_app.small_run import crowded_run, small_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_the_shipped_log_is_a_real_run_that_preempts_evicts_and_hits_in_under_300_kb():
    path, = SHIPPED.glob("*.jsonl.gz")
    run = open_run(LogLines.read(path))
    assert run.header["mode"] == "real" and run.header["model"]["name"] == "tiny"
    assert run.problem is None and len(run.requests) == 24 and path.stat().st_size < 300_000
    assert all(len(run.timeline.marks[kind]) >= 5 for kind in ("preempt", "evict", "hit", "finish"))


def test_every_step_and_phase_of_the_shipped_log_has_a_picture():
    path, = SHIPPED.glob("*.jsonl.gz")
    run = open_run(LogLines.read(path))
    for step in range(run.num_steps):
        for phase in ("before", "during", "after"):
            shown = picture(run, Address(step, "r3", phase))
            assert shown.card.step == shown.lanes.cursor == step


def test_a_truncated_log_shows_what_comes_before_and_says_so(tmp_path):
    path = tmp_path / "cut.jsonl"
    crowded(target=path)
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    run = open_run(LogLines.read(path))
    assert 0 < run.num_steps < crowded_run().num_steps
    assert "is damaged at line" in run.problem and "are loaded" in run.problem
    for step in range(run.num_steps):
        picture(run, Address(step))


def test_a_log_cut_between_two_lines_says_that_requests_are_unfinished():
    log = crowded()
    cut = LoadedLog(log.header, log.events[:300])
    run = opened(cut)
    assert run.problem.startswith("The log ends while ") and "are unfinished" in run.problem
    picture(run, Address(run.num_steps - 1))


def test_a_log_that_contradicts_itself_is_shown_up_to_there():
    log = crowded()
    place = next(n for n, event in enumerate(log.events) if event["e"] == "free")
    log.events[place] = {**log.events[place], "blocks": [99]}
    run = opened(log)
    assert run.problem.startswith(f"event {place} (free) contradicts the log before it")
    assert run.replayer.num_steps < crowded_run().num_steps


def test_a_log_without_steps_and_one_with_events_that_lack_fields_are_refused_in_a_sentence():
    header = crowded().header
    with pytest.raises(LogError, match="no step, so there is nothing to replay"):
        opened(LoadedLog(header, []))
    events = [dict(event) for event in crowded().events]
    for event in events:
        event.pop("seconds", None)
    with pytest.raises(LogError, match="lacks what its kind must have"):
        opened(LoadedLog(header, events))


def test_a_step_whose_event_lacks_a_field_is_refused_by_its_number():
    log = crowded()
    events = [{k: v for k, v in event.items() if k != "need"} for event in log.events]
    run = opened(LoadedLog(log.header, events))
    with pytest.raises(LogError, match="step 18 cannot be shown"):
        picture(run, Address(18))


def test_facts_name_pool_policies_and_counts():
    assert dict(facts(small_run()))["pool"] == "5 blocks × 4"
    assert dict(facts(small_run()))["policies"] == "mixed · fcfs · recompute · lru"


# --------------------------------------------------------------------------- links
REQUESTS = {"a": 0, "b c": 1}


def test_a_link_survives_the_round_trip():
    place = Address(7, "b c", "after")
    params = as_params("runs/x.jsonl", place)
    assert params == {"log": "runs/x.jsonl", "step": "7", "request": "b c", "phase": "after"}
    assert parse_address(params, 9, REQUESTS) == (place, [])


@pytest.mark.parametrize(("step", "shown"), [("99", 8), ("-3", 0), ("9", 8)])
def test_a_step_outside_the_log_shows_the_nearest_one_and_says_which_there_are(step, shown):
    place, problems = parse_address({"step": step}, 9, REQUESTS)
    assert place.step == shown
    assert problems == [f"The link asks for step {step}, this log has steps 0 to 8: "
                        f"showing step {shown}."]


@pytest.mark.parametrize("step", ["one", "1.5", "", "9" * 40])
def test_a_step_that_is_no_number_starts_at_0(step):
    place, problems = parse_address({"step": step}, 9, REQUESTS)
    assert place.step == 0 and "is no whole number" in problems[0]


def test_an_unknown_request_and_an_unknown_phase_are_named_and_fall_back():
    place, problems = parse_address({"request": "zz", "phase": "never"}, 9, REQUESTS)
    assert place == Address(0, None, "during")
    assert problems == ["The link selects request 'zz', which is not in this log.",
                        "The link asks for the phase 'never'; there are before, during, after: "
                        "showing during."]


def test_suggestions_point_at_the_first_preemption_and_the_first_prefix_hit():
    run = crowded_run()
    preempt, hit, _ = suggest("shipped/x", run)
    assert preempt.params == {"log": "shipped/x", "step": "18", "request": "r5"}
    assert hit.params["step"] == str(run.timeline.marks["hit"][0])
    assert len(suggest(None, None)) == 3


# --------------------------------------------------------------------------- store
def test_new_logs_get_free_names_in_the_runs_folder(runs):
    now = datetime(2026, 4, 12, 9, 30, 15)
    first = new_log("sim", now)
    first.path.write_text("{}")
    assert (first.id, new_log("sim", now).id) == (
        "runs/sim_0412_093015.jsonl", "runs/sim_0412_093015_2.jsonl")


def test_an_upload_is_kept_under_a_name_that_its_content_and_its_name_make(runs):
    entry = save_upload(gzip.compress(b"x"), "../../my run!.jsonl.gz")
    assert entry.path.parent == runs and entry.path.name.startswith("upload_my_run_")
    assert entry.path.name.endswith(".jsonl.gz") and find(entry.id) == entry


def test_an_id_is_looked_up_in_the_list_and_never_opened_as_a_path(runs):
    assert find("runs/../../../etc/passwd") is None
    assert catalog()[0].id == "shipped/tiny_crowded.jsonl.gz"


def test_labels_read_on_every_hue():
    def luminance(colour):
        parts = [int(colour[place:place + 2], 16) / 255 for place in (1, 3, 5)]
        line = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2]
    for hue in HUES:
        light, dark = sorted((luminance(hue), luminance(ink_on(hue))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.0, hue


def test_events_stay_json(tmp_path):
    crowded(target=tmp_path / "a.jsonl")
    assert all(json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
