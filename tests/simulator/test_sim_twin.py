"""The twin test on real runs: the real engine's log of the tiny model, replayed alone."""

from __future__ import annotations

from random import Random

import pytest

from engine.core.events import read_log
from engine.core.request import SamplingParams
from simulator.answers import answers_of
from simulator.fromlog import workload_from_log
from simulator.replay import replay

pytest.importorskip("torch", reason="the real engine needs torch")

SMALL = {"num_kv_blocks": 24, "kvcache_block_size": 4}  # 96 tokens for all: preempts at once
ROOMY = {"num_kv_blocks": 400, "kvcache_block_size": 4}
CASES = [
    ROOMY, SMALL, ROOMY | {"max_num_batched_tokens": 16}, SMALL | {"max_num_batched_tokens": 16},
    SMALL | {"preemption": "swap"}, SMALL | {"preemption": "swap", "num_cpu_blocks": 8},
    SMALL | {"preemption": "swap", "max_num_batched_tokens": 16},
    *({"batching": name} | pool for name in ("prefill_first", "static", "reserve")
      for pool in (ROOMY, SMALL)),
    *({"order": name} | pool for name in ("sjf", "priority", "longest_prefix")
      for pool in (ROOMY, SMALL)),
    *({"eviction": name} | SMALL for name in ("fifo", "clock")),
    SMALL | {"enable_prefix_caching": False}, SMALL | {"watermark": 0.2},
    SMALL | {"long_prefill_token_threshold": 8}, ROOMY | {"max_num_seqs": 3},
]


def run_real(path, seed, **settings):
    """A dozen requests with shared beginnings, sampled, stopped, repeated."""
    from engine.llm import LLM
    rng = Random(seed)
    beginnings = [[rng.randint(10, 900) for _ in range(12)] for _ in range(3)]
    prompts = [rng.choice(beginnings) + [rng.randint(10, 900) for _ in range(rng.randint(1, 16))]
               for _ in range(12)]
    params = [SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(2, 24),
                             seed=i, ignore_eos=i % 3 == 0, n=1 + (i == 5)) for i in range(12)]
    with LLM("tiny", log=path, max_model_len=80, **settings) as llm:
        llm.generate(prompts, params, priority=[rng.randint(0, 2) for _ in prompts])
        llm.generate(prompts[:3], params[:3])  # after an idle time, with a warm prefix cache


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_real_runs_log_is_replayed_identically(case, tmp_path):
    path = tmp_path / "real.jsonl"
    run_real(path, case, **CASES[case])
    log = read_log(path)
    report = replay(log)
    assert report.identical, str(report.difference)
    assert report.note is None and report.events == len(log.events) > 100


def test_the_real_runs_reached_preemption_swap_prefix_hits_copies_and_eviction(tmp_path):
    kinds = set()
    for seed, settings in ((1, SMALL), (4, SMALL | {"preemption": "swap"}), (0, ROOMY)):
        path = tmp_path / f"{seed}.jsonl"
        run_real(path, seed, **settings)
        kinds |= {event["e"] for event in read_log(path).events}
    assert {"preempt", "swap", "share", "copy", "evict", "cache"} <= kinds


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_that_a_step_ahead_computed_too_late_is_no_output(overlap, tmp_path):
    """Each request ends by its fifth token, which the step ahead cannot know."""
    from engine.llm import LLM
    path, prompts = tmp_path / "real.jsonl", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM("tiny", max_model_len=80, **ROOMY) as llm:
        ends = [out.token_ids[4] for out in llm.generate(prompts, free)]
    with LLM("tiny", log=path, max_model_len=80, overlap=overlap, **ROOMY) as llm:
        outs = llm.generate(prompts, [SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(end,))
            for end in ends])
    log, answers = read_log(path), [out.token_ids for out in outs]
    assert max(map(len, answers)) == 5
    assert list(answers_of(log.events).values()) == answers
    assert list(workload_from_log(log, "real").outputs) == [len(each) for each in answers]
