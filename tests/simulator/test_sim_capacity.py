"""Capacity: the known answer within the interval, few simulations, impossible wishes named."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.capacity import (
    ALONE,
    MOST,
    Search,
    find_capacity,
    offer,
    parse_prices,
    parse_slo,
    unit_workloads,
    usage,
)
from simulator.commands.capacity import _up_to
from simulator.errors import WorkloadError
from simulator.scenario import run_scenario
from simulator.workload import LONGEST

SMALL = {"model": "smollm2", "hardware": "l4", "input_len": "20:200", "output_len": "5:40",
         "max_num_seqs": 8}


class Known(Search):
    """A search over a made-up engine: each seed holds up to a capacity of its own."""

    def __init__(self, capacities, alone=0.1, slots=64, noise=lambda rate: 1.0):
        super().__init__(SMALL, {"ttft_p99": 0.5}, seeds=len(capacities), num_requests=50)
        self.capacities, self.alone, self.slots, self.noise = capacities, alone, slots, noise

    def run(self, seed, rate):
        ttft = 0.5 * (rate / self.capacities[seed]) ** 2 * self.noise(rate) + 1e-9
        latency = {"ttft": SimpleNamespace(p99=ttft), "e2el": SimpleNamespace(mean=self.alone)}
        return SimpleNamespace(metrics=SimpleNamespace(latency=latency, rejected=0), notes=[],
                               config=SimpleNamespace(max_num_seqs=self.slots), stopped=None,
                               divergence=None)


@pytest.mark.parametrize("capacities", [
    [37.0, 37.5, 36.6, 37.2, 36.9], [210.0, 190.0, 205.0, 200.0, 195.0], [12.0, 11.0, 11.5]])
def test_a_known_capacity_lies_in_the_interval_after_at_most_25_simulations(capacities):
    result = find_capacity(Known(capacities))
    truth = sum(capacities) / len(capacities)
    assert result.low <= truth <= result.high and result.rate == pytest.approx(truth, rel=0.05)
    assert len(result.probes) <= MOST and result.limit == "ttft_p99" and not result.notes
    assert len({probe.seed for probe in result.probes}) == len(capacities)


@pytest.mark.parametrize("truth", [3.0, 2000.0])  # outside 1 / e2el … 64 / e2el
def test_a_capacity_outside_the_first_guess_is_still_approached(truth):
    result = find_capacity(Known([truth] * 3, alone=0.1, slots=64))
    assert math.log(result.rate / truth) == pytest.approx(0, abs=math.log(2.0))


class OneServer(Search):
    """Poisson arrivals that wait in line for SERVICE seconds each: M/D/1."""

    SERVICE = 0.1

    def run(self, seed, rate):
        total = free = 0.0
        for at in (work := self.unit[seed].faster(rate)).at:
            free = max(free, at) + self.SERVICE
            total += free - at
        latency = {"e2el": SimpleNamespace(mean=total / len(work))}
        return SimpleNamespace(metrics=SimpleNamespace(latency=latency, rejected=0), notes=[],
                               config=SimpleNamespace(max_num_seqs=1), stopped=None,
                               divergence=None)


@pytest.fixture(scope="module")
def arrivals():
    """Five lists of seeds."""
    return [unit_workloads(SMALL | {"seed": 5 * each}, 5, 4000) for each in range(5)]


# Pollaczek-Khinchine: waiting W = SERVICE rho / (2 (1 - rho)), so rho = 2 W / (SERVICE + 2 W).
@pytest.mark.parametrize("bound, truth", [(0.2, 6.6667), (0.15, 5.0), (0.11, 1.6667),
                                          (0.105, 0.90909), (0.101, 0.19608)])
def test_the_interval_covers_what_queueing_theory_says_however_close_the_bound(
        arrivals, bound, truth):
    covered = 0
    for unit in arrivals:
        search = OneServer(SMALL, {"e2el_mean": bound}, unit=unit)
        result = find_capacity(search)
        covered += result.low <= truth <= result.high
        assert len(result.probes) <= MOST and result.high < 1.7 * result.low
        for seed in range(5):  # the answer lies between rates that were simulated
            held = [probe.rate for probe in result.probes if probe.seed == seed and probe.holds]
            assert result.rate / 1.5 < max(held) < result.rate * 1.5
    assert covered >= 4  # of 5 intervals of 95 %


def test_a_seed_that_never_held_opens_the_interval_downwards():
    result = find_capacity(Known([37.0, 1e-9, 37.0]))
    lowest = min(probe.rate for probe in result.probes if probe.seed == 1)
    assert (result.rate, result.low) == (0.0, 0.0) and 37.0 < result.high < math.inf
    assert f"held at no rate tried, down to {lowest:.3g} requests/s, of 1 of 3" in result.notes[0]
    priced = offer("l4", 0.7, result, 20.0, {})
    assert priced.price == math.inf and "no number of engines can be told" in priced.problem


def test_a_seed_that_never_broke_opens_the_interval_upwards():
    result = find_capacity(Known([37.0, math.inf, 37.0]))
    assert result.rate == result.low < 37.0 and result.high == math.inf
    assert "broke at no rate tried of 1 of 3 seeds" in result.notes[0]


@pytest.mark.parametrize("capacities", [[37.0, 1e-9], [3.9, 1e-9], [37.0, 9.0, 1e-9]])
def test_no_rate_is_told_that_lies_beyond_those_that_broke_in_every_seed(capacities):
    result = find_capacity(Known(capacities))
    broke = [min(probe.rate for probe in result.probes if probe.seed == seed and not probe.holds)
             for seed in range(len(capacities))]
    assert result.low == 0 and result.high == max(broke) < 1.5 * max(capacities)


@pytest.mark.parametrize("capacities", [[37.0, math.inf], [37.0, 9.0, math.inf]])
def test_no_rate_is_told_below_those_that_held_in_every_seed(capacities):
    result = find_capacity(Known(capacities))
    held = [max(probe.rate for probe in result.probes if probe.seed == seed and probe.holds)
            for seed in range(len(capacities))]
    assert result.high == math.inf and result.rate == result.low == min(held)
    assert result.low > min(capacities) / 1.5


def test_two_seeds_far_apart_have_no_interval():
    result = find_capacity(Known([40.0, 10.0]))  # Student's t alone: 0.003 to 130,000
    assert (result.low, result.high) == (0.0, math.inf)
    assert result.rate == pytest.approx(20.0, rel=0.05)  # the geometric mean
    note, = result.notes
    told = re.search(r"of 2 seeds lie between (\S+) and (\S+) requests/s", note)
    assert 9.5 < float(told[1]) <= 10 and 40 <= float(told[2]) < 42
    assert "--num-requests or --seeds" in note
    assert "no number of engines" in offer("l4", 0.7, result, 20.0, {}).problem
    near = find_capacity(Known([11.0, 10.0]))  # half the gap of the logarithms, times 12.706: 0.61
    assert near.high / near.rate == pytest.approx(math.exp(0.61), rel=0.05)
    assert _up_to(result) == "up to about 19.9 requests/s, how far off that is not known"


def test_a_bound_near_what_the_first_seed_alone_takes_is_not_said_to_hold_anywhere(tmp_path):
    uses = [usage(Search(SMALL | {"seed": seed}, {"ttft_mean": 1.0}, seeds=2,
                         num_requests=60).alone(), {"ttft_mean": 1.0})[0] for seed in range(4)]
    seed = next(seed for seed in range(3) if uses[seed] < uses[seed + 1])
    bound, path = (uses[seed] + uses[seed + 1]) / 2, tmp_path / "c.json"
    result = call(*FAST, "--hardware", "l4", "--seed", seed, "--slo", f"ttft_mean={bound:.12g}",
                  "--json", path)
    answer = json.loads(path.read_text())
    assert result.exit_code == 0 and (answer["rate"], answer["low"]) == (0.0, 0.0)
    assert not any(probe["used"] <= 1 for probe in answer["probes"] if probe["seed"] == 1)
    assert (f"at most up to {answer['high']:.3g} requests/s, how far below is not known"
            in result.output)


def test_noise_that_is_not_monotone_is_told():
    bump = lambda rate: 3.0 if 30 < rate < 36 else 1.0  # noqa: E731
    result = find_capacity(Known([60.0] * 5, noise=bump))
    held = [probe.rate for probe in result.probes if probe.holds]
    broken = [probe.rate for probe in result.probes if not probe.holds]
    assert bool(result.notes) == any(a > b for a in held for b in broken)
    assert result.low <= 60.0


def test_the_slo_holds_below_the_interval_and_breaks_above_it():
    slo = parse_slo("ttft_p90=0.05,e2el_p90=0.4")
    result = find_capacity(Search(SMALL, slo, seeds=3, num_requests=120))
    work = unit_workloads({**SMALL, "seed": 7}, 2, 200)[0]
    below = run_scenario(SMALL, work.faster(result.low * 0.7))
    above = run_scenario(SMALL, work.faster(result.high * 1.5))
    assert usage(below, slo)[0] <= 1.0 < usage(above, slo)[0]


def test_seeds_share_nothing_and_rates_of_one_seed_share_everything_but_gaps():
    first, second = unit_workloads(SMALL, 2, 100)
    assert first.prompts != second.prompts
    fast = first.faster(8.0)
    assert fast.prompts == first.prompts and fast.outputs == first.outputs
    assert [8 * time for time in fast.at] == pytest.approx(
        [time - first.at[0] * (1 - 8) for time in first.at], rel=1e-9)


def test_a_trace_is_cut_into_windows_that_share_no_request(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("at,prompt,output\n" + "".join(f"{i / 4},{i + 1},3\n" for i in range(120)))
    first, second = unit_workloads({"trace": str(path)}, 2, 1000)
    assert list(first.prompts) == list(range(1, 61))
    assert list(second.prompts) == list(range(61, 121))
    assert first.rate == second.rate == pytest.approx(1.0) and second.at[0] == 0.0
    with pytest.raises(WorkloadError, match="120 requests cannot be cut into 5 windows"):
        unit_workloads({"trace": str(path)}, 5, 1000)


def call(*words):
    return CliRunner().invoke(app, ["capacity", *(str(word) for word in words)])


FAST = ("--model", "smollm2", "--input-len", "20:200", "--output-len", "5:40", "--num-requests",
        60, "--seeds", 2, "--max-num-seqs", 8)


def test_the_command_names_rate_interval_and_what_gives(tmp_path):
    path = tmp_path / "c.json"
    result = call(*FAST, "--hardware", "l4", "--slo", "ttft_p99=0.05", "--slo", "e2el_p99=9",
                  "--json", path)
    assert result.exit_code == 0 and "holds ttft_p99=0.05,e2el_p99=9 up to" in result.output
    answer = json.loads(path.read_text())
    assert answer["low"] < answer["rate"] < answer["high"] and len(answer["probes"]) <= MOST


def test_prices_name_the_cheapest_device_and_why_others_are_none():
    result = call(*FAST, "--slo", "ttft_p99=0.05", "--prices", "h100=2.5,l4=0.7,tpu=1", "--rate",
                  2000, "--seeds", 5)
    assert result.exit_code == 0, result.output
    assert "cheapest: " in result.output and "not tpu: unknown hardware 'tpu'" in result.output


def test_an_interval_too_wide_to_count_engines_by_is_no_offer():
    result = call(*FAST, "--slo", "ttft_p99=0.05", "--prices", "l4=0.7", "--rate", 2000)
    assert result.exit_code == 2 and "no number of engines can be told" in result.output
    assert "none of the devices" in result.stderr and "cheapest" not in result.output
    capacity = SimpleNamespace(rate=10.0, low=4.9, high=20.0)
    each = offer("l4", 0.7, capacity, 20.0, {})
    assert each.price == math.inf and "between 4.9 and 20 requests/s each" in each.problem
    assert offer("l4", 0.7, SimpleNamespace(rate=10.0, low=5.0, high=20.0), 20.0, {}).replicas == 4


def test_bursts_that_break_the_slo_at_any_rate_are_not_called_a_request_alone():
    words = (*FAST, "--hardware", "l4", "--burstiness", 0.001)
    alone = SMALL | {"burstiness": 0.001}
    bound = usage(Search(alone, {"ttft_p99": 1.0}, seeds=2, num_requests=60).alone(),
                  {"ttft_p99": 1.0})[0]
    burst = call(*words, "--slo", f"ttft_p99={bound * 1.01:g}")
    assert burst.exit_code == 2 and burst.stderr.count("\n") == 1
    assert "because these requests come in bursts, though each alone would hold" in burst.stderr
    device = call(*words, "--slo", f"ttft_p99={bound * 0.9:g}")
    assert f"even a request alone has ttft_p99 = {bound:.3g} s on l4" in device.stderr


def test_many_requests_are_set_apart_only_as_far_as_a_clock_tells():
    search = Search(SMALL, {"ttft_p99": 1.0}, seeds=2, num_requests=20_000)
    assert search.lowest == pytest.approx(2e-5, rel=0.05) and ALONE == 1e-5
    assert search.unit[0].faster(search.lowest).span <= LONGEST
    assert Search(SMALL, {"ttft_p99": 1.0}, seeds=2, num_requests=60).lowest == ALONE


def test_the_answer_as_json_is_read_by_strict_parsers(tmp_path):
    path = tmp_path / "c.json"
    assert call(*FAST, "--hardware", "l4", "--slo", "e2el_p99=100", "--json", path).exit_code == 0
    answer = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert None in [probe["used"] for probe in answer["probes"]]  # where the queue diverges


def test_engines_are_counted_by_the_lower_end_of_the_interval():
    capacity = SimpleNamespace(rate=10.0, low=9.0, high=11.0)
    each = offer("l4", 0.7, capacity, 20.0, {"tp": 2})
    assert (each.replicas, each.price) == (3, pytest.approx(3 * 2 * 0.7))


@pytest.mark.parametrize("words, sentence", [
    (("--slo", "ttft=1"), "--slo 'ttft=1' is not of the form"),
    (("--slo", "ttft_p99=1, tpot_p99=1,ttft_p99=2"), "bounds ttft_p99 twice: give it once"),
    (("--slo", "ttft_p99=1", "--prices", "l4=1, l4=2", "--rate", 1),
     "--prices 'l4=1, l4=2' names one device twice"),
    (("--slo", "ttft_p99=1", "--slo", "ttft_p99=2"), "'ttft_p99=1,ttft_p99=2' bounds ttft_p99 tw"),
    (("--slo", "ttft_p99=1", "--prices", "l4=1", "--prices", "l4=2", "--rate", 1),
     "--prices 'l4=1,l4=2' names one device twice"),
    (("--slo", "ttft_p99=-1"), "not of the form"), (("--slo", "ttft_p98=1"), "not of the form"),
    (("--slo", "ttft_p99=1e-6"), "the SLO cannot be met: even a request alone has ttft_p99 ="),
    (("--slo", "ttft_p99=1", "--prices", "l4=1"), "--prices and --rate go together"),
    (("--slo", "ttft_p99=1", "--prices", "l4", "--rate", 1), "--prices 'l4' is not of the form"),
    (("--slo", "ttft_p99=1", "--prices", "l4=1", "--rate", 1, "--cost", "x.toml"),
     "--cost describes one machine"),
    (("--slo", "ttft_p99=1", "--seeds", 9), "9 seeds cannot give an interval"),
    (("--slo", "ttft_p99=1", "--max-model-len", 100), "no rate can be told"),
    (("--slo", "ttft_p99=1e-6", "--prices", "l4=1", "--rate", 1), "none of the devices")])
def test_mistakes_are_one_sentence(words, sentence):
    result = call(*FAST, *words)
    assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1


def test_prices_are_read():
    assert parse_prices("h100=2.5, l4=0.7") == {"h100": 2.5, "l4": 0.7}


def test_prefill_and_decode_may_be_split_and_the_split_says_what_gives():
    slo = ("--hardware", "l4", "--slo", "ttft_p99=0.5")
    split = call(*FAST, *slo, "--disaggregate", "1:1", "--kv-link", 10)
    assert split.exit_code == 0 and "holds ttft_p99=0.5 up to" in split.output
    wrong = call(*FAST, *slo, "--disaggregate", "1:1", "--replicas", 3)
    assert wrong.exit_code == 2 and "leave replicas out" in wrong.stderr
