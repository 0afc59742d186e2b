"""Random request sets with aborts on pools that are too small: everything ends, nothing stays."""

from __future__ import annotations

import random

import pytest

from engine import LLM, SamplingParams
from engine.core.errors import RequestError
from engine.core.request import FINISH_REASONS
from engine.runner.model_runner import Prepared

ENGINES = {
    "recompute": dict(num_kv_blocks=16, block_size=4, max_num_batched_tokens=24),
    "swap": dict(num_kv_blocks=18, block_size=4, preemption="swap", num_cpu_blocks=12,
                 max_num_batched_tokens=40),
    "priority, no cache": dict(num_kv_blocks=40, block_size=2, order="priority",
                               enable_prefix_caching=False, max_num_seqs=5),
    "overlapped": dict(num_kv_blocks=18, block_size=4, preemption="swap", num_cpu_blocks=12,
                       max_num_batched_tokens=24, overlap=True),
}


def random_params(rng: random.Random) -> SamplingParams:
    most = rng.randint(1, 24)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]), top_k=rng.choice([0, 0, 1, 5, 900]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.95]), min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.2]), presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.3]), logit_bias=rng.choice([(), ((7, 2.0),)]),
        logprobs=rng.choice([None, None, 0, 3]), seed=rng.choice([None, 1]),
        n=rng.choice([1, 1, 3]), max_tokens=most, min_tokens=rng.randint(0, most),
        ignore_eos=rng.random() < 0.3,
        stop=rng.choice([(), (), (".",), ("a", "th")]),
        include_stop_str_in_output=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (), tuple(range(100, 160))]))


def random_prompt(rng: random.Random) -> list[int]:
    if rng.random() < 0.15:
        return rng.choice([[], [5000], [3] * 80])
    common = ([9, 8, 7, 6, 5, 4, 3, 9] * 3)[:rng.choice([0, 8, 24])]
    return common + [rng.randrange(1024) for _ in range(rng.randint(1, 24))]


def run_one_set(llm: LLM, rng: random.Random) -> dict[str, int]:
    """Submit, stream, abort at random; how often each end occurred."""
    ends = dict.fromkeys([*FINISH_REASONS, "refused", "closed"], 0)
    streams = []
    for _ in range(rng.randint(1, 12)):
        try:
            streams.append(llm.stream(random_prompt(rng), random_params(rng),
                                      priority=rng.randint(0, 2)))
        except RequestError:
            ends["refused"] += 1
    while streams:
        stream = rng.choice(streams)
        delta = next(stream, None)
        if delta is None or rng.random() < 0.03:
            ends["closed"] += delta is not None
            stream.close()
            streams.remove(stream)
        elif delta.finish_reason:
            ends[delta.finish_reason] += 1
        elif rng.random() < 0.03:
            llm.engine.abort(delta.request_id)
    return ends


def run_sets(llm: LLM, seeds: range) -> dict[str, int]:
    """run_one_set() of each seed; after each nothing may be left. How often each end occurred."""
    scheduler, total = llm.engine.scheduler, {}
    for seed in seeds:
        for end, times in run_one_set(llm, random.Random(seed)).items():
            total[end] = total.get(end, 0) + times
        while llm.engine.step():
            pass
        assert not llm.engine.sessions and not scheduler.live
        assert scheduler.manager.pool.num_free == scheduler.config.num_blocks
        if seed % 4 == 0:
            assert scheduler.reset_prefix_cache()
    return total


@pytest.mark.parametrize("name", ENGINES)
def test_every_request_ends_with_a_reason_and_no_block_stays(name, seeds=range(10)):
    with LLM("tiny", max_model_len=64, **ENGINES[name]) as llm:
        total = run_sets(llm, seeds)
    assert total["error"] == 0
    assert min(total[end] for end in ("stop", "length", "abort", "refused", "closed")) > 0, total


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("name", ENGINES)
def test_two_thousand_sets_leave_nothing_behind(name, part):
    test_every_request_ends_with_a_reason_and_no_block_stays(
        name, range(1000 + 100 * part, 1100 + 100 * part))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_executor_that_fails_now_and_then_ends_what_it_failed_and_nothing_else(
        overlap, monkeypatch):
    rng, thrown = random.Random(7), []
    with LLM("tiny", max_model_len=64, overlap=overlap, **ENGINES["recompute"]) as llm:
        launch, read = llm.engine.runner.launch, Prepared.read

        def faulty(step):
            launch(step)
            if rng.random() < 0.02:
                thrown.append("step")
                raise RuntimeError("CUDA error: an illegal memory access")

        def strange(step):
            output = read(step)
            if output.tokens and isinstance(output.tokens[0], int) and rng.random() < 0.02:
                thrown.append("token")
                output.tokens[0] = -3
            return output
        monkeypatch.setattr(llm.engine.runner, "launch", faulty)
        monkeypatch.setattr(Prepared, "read", strange)
        total = run_sets(llm, range(50, 62))
    assert {"step", "token"} <= set(thrown)
    assert total["error"] > 0 and total["length"] > 0 and total["stop"] > 0, total
