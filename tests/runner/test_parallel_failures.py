"""Two ranks, and steps that fail: on both alike, on rank 0 alone, on the worker alone.

In float64, so that other batches do not change a token by rounding.
"""

from __future__ import annotations

import random
import time

import pytest

from engine import LLM, SamplingParams
from engine.hub import Hub, RankLost
from engine.parallel import _abort
from tests.runner.faults import Faulty, inject

SETTINGS = dict(dtype="float64", max_model_len=64, num_kv_blocks=24, kvcache_block_size=4,
                max_num_seqs=4, max_num_batched_tokens=32)
ALIKE = {4: "sums", 9: "moves", 10: "sums", 15: "head", 20: "prepare", 21: "prepare",
         27: "sums", 33: "share", 60: "head", 61: "head"}
ALONE = {24: "prepare", 30: "draw", 36: "read", 40: "nan", 44: "draw", 45: "sums", 50: "prepare"}
NEVER = {24: "sums", 50: "prepare", 45: "sums"}  # on the worker: where rank 0 does not even start
TOLD = {"prepare", "sums", "moves", "head", "draw", "share", "read"}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and seeded, some penalised: those need the token of the step before."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1000) for _ in range(rng.randint(2, 20))] for _ in range(72)]
    params = [SamplingParams(temperature=0.9 if n % 2 else 0.0, seed=n, ignore_eos=True,
                             max_tokens=rng.randint(5, 11),
                             repetition_penalty=1.3 if n % 5 == 0 else 1.0) for n in range(72)]
    return prompts, params


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one rank samples, with no failure and no look-ahead."""
    return [output.token_ids for output in LLM("tiny", **SETTINGS).generate(*workload())]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_ends_its_requests_and_the_ranks_stay_in_step(
        overlap, expected, monkeypatch):
    fired = inject({**ALIKE, **ALONE}, monkeypatch.setattr)
    with LLM("tiny", tensor_parallel_size=2, overlap=overlap, **SETTINGS,
             scheduler_options={"order": Faulty({**ALIKE, **NEVER})}) as llm:
        outputs = llm.generate(*workload())
        assert set(fired) == {*ALIKE, *ALONE} - ({10, 45, 61} if overlap else {33})
        errors = {output.error for output in outputs} - {None}
        assert errors == {"the model computed NaN logits for this request"} | {
            f"the step failed: ValueError: boom in {where}"
            for where in TOLD - (set() if overlap else {"share"})}
        for output, tokens in zip(outputs, expected, strict=True):
            if output.finish_reason == "error":
                assert output.token_ids == tokens[:len(output.token_ids)]
            else:
                assert output.token_ids == tokens
        assert sum(output.finish_reason == "length" for output in outputs) >= 6
        prompts, params = workload()
        again = llm.generate(prompts[:20], params[:20])
        assert [output.token_ids for output in again] == expected[:20]
        scheduler = llm.engine.scheduler
        assert scheduler.manager.pool.num_free == scheduler.config.num_blocks
        lose_a_rank_in_a_commit(llm)


def lose_a_rank_in_a_commit(llm: LLM) -> None:
    """The caller hears of it, and whoever comes later; no process stays."""
    (peer,) = llm.engine.lead.hub.peers
    commit, calls = llm.engine.scheduler.commit, []

    def lost(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            llm.engine.lead.hub.lose(RankLost(f"{peer.name} is gone"))
        return commit(*arguments, **options)

    llm.engine.scheduler.commit = lost
    with pytest.raises(RankLost) as told:
        llm.generate(*workload())
    assert str(told.value) == f"{peer.name} is gone"
    assert not llm.engine.sessions
    for later in (llm.generate, llm.stream):
        with pytest.raises(RankLost) as told:
            later([[1, 2, 3]])
        assert str(told.value) == f"this engine is lost, make a new one: {peer.name} is gone"
    llm.close()
    assert peer.process.returncode is not None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_fails_alone_is_named_while_rank_0_waits_for_it(overlap):
    with LLM("tiny", tensor_parallel_size=2, overlap=overlap, **SETTINGS,
             scheduler_options={"order": Faulty({5: "sums"}, patience=0.1)}) as llm:
        (peer,) = llm.engine.lead.hub.peers
        started = time.monotonic()
        with pytest.raises(RankLost) as told:
            llm.generate(*workload())
        assert str(told.value) == (f"{peer.name} failed: ValueError: boom in sums, in step 5, "
                                   f"where rank 0 went on")
        assert time.monotonic() - started < 10
    assert peer.process.returncode is not None


def test_what_waits_for_a_lost_rank_is_aborted_once_and_all_know_by_then():
    seen = []

    class Group:
        def abort(self):
            seen.append(str(hub.lost))
            raise RuntimeError("the watchdog was faster")

    hub = Hub([])
    hub.on_lost = lambda: _abort(Group())
    hub.lose(RankLost("rank 1 is gone"))
    hub.lose(RankLost("rank 2 is gone"))
    assert seen == ["rank 1 is gone"]
