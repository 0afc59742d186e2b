"""The report of fidelity.py, on runs whose machine is known: it must find that machine again."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

from fidelity_report import _slowed, report

from simulator.api import simulate
from simulator.basis import Reference
from simulator.fitted import Fitted, Machine
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.modelspec import load_model
from simulator.workload import poisson

SMOL, L4 = load_model("smollm2-135m"), load_hardware("l4")
TRUTH = Machine("truth", Reference(0.44, 36.0), {
    "weights": 1.2, "gemm": 2.0, "gemm_8": 1.0, "prefill": 3.0, "decode": 4.0, "step": 20.0})


def run(folder, name, rate, inputs, outputs, slower=1.0, **settings):
    work = poisson(rate, 30, parse_lengths(inputs), parse_lengths(outputs), seed=len(name))
    simulate(work, SMOL, L4, {"num_blocks": 600, "max_model_len": 1024} | settings,
             cost=Fitted(_slowed(TRUTH, slower), SMOL), log=folder / f"{name}.1.jsonl")
    return SimpleNamespace(name=name, load=rate, inputs=inputs, outputs=outputs, settings=settings)


def test_runs_of_a_known_machine_are_predicted_and_policies_ranked_as_it_ranks_them(tmp_path):
    calibrated = [run(tmp_path, f"c{i}", rate, lengths, "8:40", max_num_batched_tokens=budget)
                  for i, (rate, lengths, budget) in enumerate([
                      (1.0, "16:256", 256), (3.0, "16:128", 128), (float("inf"), "64:512", 512),
                      (float("inf"), "8:64", 256), (1.0, "256:700", 128), (0.5, "16:512", 512)])]
    predicted = [run(tmp_path, "p1", 2.0, "32:200", "16:60"),
                 run(tmp_path, "p22", float("inf"), "100:400", "8:30", batching="prefill_first")]
    ranked = [run(tmp_path, f"r-{name}", 2.0, "64:384", "16:60", batching=name)
              for name in ("mixed", "static")]
    for name in ("p1", "r-mixed"):  # made again, to the last bit the same
        (tmp_path / f"{name}.2.jsonl").write_bytes((tmp_path / f"{name}.1.jsonl").read_bytes())
    text = report(tmp_path, calibrated, predicted, ranked)
    found = re.search(r"these figures: median ([\d.]+)%, p95 ([\d.]+)%", text)
    assert found and float(found[1]) < 0.5 and float(found[2]) < 1.5, text
    assert "p1 TTFT 0%, TPOT 0%, E2EL 0%, output 0%" in text
    assert re.search(r"round by round: p1 1\.00/1\.00, p22 1\.00\.", text), text
    assert text.count("simulated the same. 1 of 1 pairs") >= 2
    data = json.loads((tmp_path / "fidelity.json").read_text())
    assert set(data) == {"p1", "p22", "r-mixed", "r-static"}
    assert len(data["p1"]["rounds"]) == 2
    assert (tmp_path / "machine.toml").exists()


def test_a_machine_slower_in_one_run_is_told_from_an_error_of_the_simulator(tmp_path):
    """The predicted run's machine is 1.3 times slower: its own pace leaves no error."""
    calibrated = [run(tmp_path, f"c{i}", float("inf"), lengths, "8:40")
                  for i, lengths in enumerate(["16:256", "64:512", "8:64"])]
    slow = run(tmp_path, "p1", 2.0, "32:200", "16:60", slower=1.3)
    text = report(tmp_path, calibrated, [slow], [slow])
    first, second = (float(found) for found in re.findall(r"median ([\d.]+)%", text))
    assert first > 15 and second < 1.5, text
    assert "p1 1.30." in text
