"""Look-ahead in the real engine: a step starts while the one before runs, and nothing else shows.

In float64, so that other batches do not change a token by rounding.
"""

from __future__ import annotations

import random
import signal
import threading

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.events import EventLog, read_log
from engine.core.request import Request
from engine.runner.model_runner import Prepared
from simulator.replay import replay

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
BASE = dict(max_model_len=96, num_kv_blocks=64, block_size=4, dtype="float64", max_num_seqs=8)
SETTINGS = {
    "roomy": {},
    "preempted": {"num_kv_blocks": 26},
    "swapped": {"num_kv_blocks": 26, "preemption": "swap"},
    "chunked": {"max_num_batched_tokens": 7},
    "no cache": {"enable_prefix_caching": False},
    "prefill first": {"batching": "prefill_first"},
    "two at once": {"max_num_seqs": 2},
}


def workload(number: int = 12, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy, seeded and penalised rows with stops of every kind, common prefixes, and samples."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 1000) for _ in range(20)]
    prompts = [shared[:rng.choice([0, 0, 10, 20])]
               + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 30))] for _ in range(number)]
    params = [SamplingParams(
        temperature=0.9 if n % 2 else 0.0, max_tokens=rng.randint(1, 40), seed=n,
        ignore_eos=n % 3 > 0, top_k=rng.choice([0, 20]), top_p=rng.choice([1.0, 0.9]),
        n=3 if n == 5 else 1, logprobs=2 if n % 4 == 0 else None,
        repetition_penalty=1.3 if n % 4 == 1 else 1.0, frequency_penalty=0.4 * (n % 5 == 2),
        presence_penalty=0.3 * (n % 5 == 3), min_tokens=0,
        stop=(".", "th") if n % 4 == 2 else (),
        stop_token_ids=tuple(range(100, 140)) if n % 4 == 3 else ()) for n in range(number)]
    return prompts, params


def everything(outputs) -> list:
    return [[(s.token_ids, s.text, s.finish_reason, s.stop_reason,
              s.logprobs and [sorted(entry) for entry in s.logprobs]) for s in output.outputs]
            for output in outputs]


def load(**options) -> LLM:
    return LLM("tiny", **{**BASE, **options})


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_texts_and_reasons_are_those_of_one_step_after_the_other(name):
    prompts, params = workload()
    expected = everything(load(**SETTINGS[name]).generate(prompts, params))
    with load(overlap=True, log=EventLog(None, {}), **SETTINGS[name]) as llm:
        outputs = llm.generate(prompts, params)
        assert everything(outputs) == expected
        preempted = sum(output.outputs[0].num_preemptions for output in outputs)
        assert preempted > 0 or name not in ("preempted", "swapped")
        kinds = {sample[2] for output in expected for sample in output}
        assert {"stop", "length"} <= kinds
        scheduler = llm.engine.scheduler
        assert scheduler.manager.pool.num_free == scheduler.config.num_blocks
        assert scheduler.reset_prefix_cache() and not llm.engine.sessions
        steps = [event["e"] for event in llm.engine.log.events if event["e"] in ("batch", "token")]
        assert "batchbatchtoken" in "".join(steps)  # a step is scheduled before one is known


@pytest.mark.parametrize("name", SETTINGS)
def test_a_log_of_an_overlapped_run_replays_to_the_same_schedule(name, tmp_path):
    path = tmp_path / "run.jsonl"
    with load(overlap=True, log=path, **SETTINGS[name]) as llm:
        llm.generate(*workload())
    report = replay(read_log(path))
    assert report.identical, report.difference
    assert report.batches > 20 and report.note is None


def test_the_next_step_starts_while_the_one_before_still_computes(monkeypatch):
    with load(overlap=True) as llm:
        runner, inside, waited = llm.engine.runner, threading.Event(), []
        launch, prepare = runner.launch, runner.prepare_step

        def slow(step):
            inside.set()
            launch(step)

        def prepare_step(batch, before=None):
            if before is not None and before.rows:
                waited.append(before.draw is None)  # the step before has drawn nothing so far
            return prepare(batch, before)

        gate = threading.Event()

        def gated(step):
            gate.wait(0.05)
            slow(step)
        monkeypatch.setattr(runner, "launch", gated)
        monkeypatch.setattr(runner, "prepare_step", prepare_step)
        (out,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=6,
                                                     ignore_eos=True))
        assert len(out.token_ids) == 6 and inside.is_set()
        assert waited and all(waited)


def test_unknown_tokens_are_gathered_from_the_rows_that_bring_them():
    from tests.runner.tiny_models import make_batch, make_request
    llm = load()
    runner = llm.engine.runner
    requests = [make_request(f"{n}", [5 + n] * (3 + n), [2 * n, 2 * n + 1]) for n in range(4)]
    for number, request in enumerate(requests):
        request.seq = number
    first = make_batch([(r, 0, len(r.tokens)) for r in requests])
    before = runner.prepare_step(first)
    ahead = make_batch([(r, len(r.tokens), 1) for r in reversed(requests[1:])])
    step = runner.prepare_step(ahead, before)
    assert isinstance(step, Prepared) and step.unknown.tolist() == [0, 1, 2]
    runner.launch(before)
    tokens = dict(zip([r.id for r in requests], before.read().tokens))
    ids = torch.zeros(3, dtype=torch.int64)
    step.fill(ids)
    order = [first.requests[before.rows[source]].id for source in step.sources]
    assert ids.tolist() == [tokens[name] for name in order]
    runner.launch(step)
    ahead_tokens = step.read().tokens
    for request in requests[1:]:
        request.tokens.append(tokens[request.id])
    again = make_batch([(r, len(r.tokens) - 1, 1) for r in reversed(requests[1:])])
    assert runner.run(again).tokens == ahead_tokens


# ------------------------------------------------------------------------------- aborts and faults

def test_an_abort_ends_a_request_with_its_next_step_in_flight():
    with load(overlap=True) as llm:
        long = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.0)
        stream = llm.stream([[5, 6], [7, 8]], long)
        ends = {}
        for number, delta in enumerate(stream):
            if number == 6:
                llm.engine.abort("r0")
            if delta.finish_reason:
                ends[delta.request_id] = delta.finish_reason
        assert ends == {"r0": "abort", "r1": "length"}
        assert llm.engine.scheduler.manager.pool.num_free == 64


def test_a_row_that_fails_in_flight_ends_its_request_alone():
    with load(overlap=True) as llm:
        (expected,) = llm.generate([[9, 8, 7]], GREEDY)
        cache = llm.engine.runner.cache
        sessions = llm.stream([[1, 2, 3, 4, 5], [9, 8, 7]],
                              GREEDY)
        ends, ids = {}, []
        for number, delta in enumerate(sessions):
            if number == 2:
                victim = llm.engine.scheduler.live["r1"]
                cache.device_blocks[0, 0, victim.block_table[0]] = float("nan")
            if delta.finish_reason:
                ends[delta.request_id] = (delta.finish_reason, delta.error)
            if delta.request_id == "r2":
                ids += delta.token_ids
        assert ends["r1"][0] == "error" and "NaN" in ends["r1"][1]
        assert ends["r2"] == ("length", None) and ids == expected.token_ids


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("part", ["prepare_step", "launch"])
def test_a_failed_step_ends_its_own_requests_and_no_others(name, part, monkeypatch, tmp_path):
    prompts, params = workload(seed=1)
    rng = random.Random(f"{name} {part}")
    expected = {output.request_id: output.outputs
                for output in load(**SETTINGS[name]).generate(prompts, params)}
    log = tmp_path / "run.jsonl"
    with load(overlap=True, log=log, **SETTINGS[name]) as llm:
        runner, scheduler = llm.engine.runner, llm.engine.scheduler
        plain, failed, calls = getattr(runner, part), [], []
        fatal = sorted(rng.sample(range(2, 40), 3))

        def broken(step, *before):
            calls.append(step)
            if len(calls) - 1 in fatal:
                batch = step if part == "prepare_step" else step.batch
                failed.append({request.id for request in batch.requests})
                raise MemoryError("no memory for 3 GiB")
            return plain(step, *before)
        monkeypatch.setattr(runner, part, broken)
        outputs = llm.generate(prompts, params)
        hit, ended = set().union(*failed), set()
        for output in outputs:
            for sample, whole in zip(output.outputs, expected[output.request_id], strict=True):
                name_of = output.request_id + (f".{sample.index}" if sample.index else "")
                if sample.finish_reason == "error":
                    ended.add(name_of)
                    assert sample.error == "the step failed: MemoryError: no memory for 3 GiB"
                    assert sample.token_ids == whole.token_ids[:len(sample.token_ids)]
                else:
                    assert (sample.token_ids, sample.text, sample.finish_reason) == (
                        whole.token_ids, whole.text, whole.finish_reason)
        assert failed and ended and ended <= hit
        assert scheduler.manager.pool.num_free == scheduler.config.num_blocks
        assert not llm.engine.sessions
    report = replay(read_log(log))
    assert report.identical, report.difference


def test_a_newcomer_in_the_step_after_a_failed_one_goes_on(monkeypatch):
    with load(overlap=True) as llm:
        expected = llm.generate([[9, 8, 7, 6, 5]], GREEDY)[0].token_ids
        runner, steps, sessions = llm.engine.runner, [], []
        prepare, launch = runner.prepare_step, runner.launch

        def prepare_step(batch, before=None):
            steps.append([request.id for request in batch.requests])
            if len(steps) == 4:  # scheduled, not started yet: who comes now is in the next step
                sessions.append(llm.engine.submit(Request("late", [9, 8, 7, 6, 5], GREEDY)))
                doomed.append(batch.step)
            return prepare(batch, before)

        def broken(step):
            if step.batch.step in doomed:
                failed.append([request.id for request in step.batch.requests])
                raise MemoryError("no memory for 3 GiB")
            return launch(step)
        failed, doomed = [], []
        monkeypatch.setattr(runner, "prepare_step", prepare_step)
        monkeypatch.setattr(runner, "launch", broken)
        (early,) = llm.generate([[5, 6]], GREEDY)
        assert early.finish_reason == "error" and failed == [[early.request_id]]
        assert steps[4] == [early.request_id, "late"]  # it stood on the one that failed
        while not sessions[0].done:
            llm.engine.step()
        late = sessions[0].output()
        assert (late.token_ids, late.finish_reason) == (expected, "length")
        llm.engine.close(sessions[0])
        assert llm.engine.scheduler.manager.pool.num_free == 64


@pytest.mark.parametrize("part", ["prepare_step", "launch"])
def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(part, monkeypatch):
    with load(overlap=True) as llm:
        (expected,) = llm.generate([[5, 6]], GREEDY)
        plain, calls = getattr(llm.engine.runner, part), []

        def broken(*args):
            calls.append(args)
            if len(calls) == 4:
                raise MemoryError("no memory for 3 GiB")
            return plain(*args)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, part, broken)
            outputs = llm.generate([[5, 6], [7]], GREEDY)
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert outputs[0].error == "the step failed: MemoryError: no memory for 3 GiB"
        assert outputs[0].token_ids == expected.token_ids[:3]
        (again,) = llm.generate([[5, 6]], GREEDY)
        assert again.token_ids == expected.token_ids
        assert llm.engine.scheduler.manager.pool.num_free == 64


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_stops_the_model_and_is_no_error_is_raised_once(stop, overlap, monkeypatch):
    """As sys.exit() in a hook: the step's requests end, the caller hears of it, that is all."""
    with load(overlap=overlap) as llm:
        (expected,) = llm.generate([[5, 6]], GREEDY)
        model, calls = llm.engine.runner.model, []
        forward = model.forward

        def stopping(*args, **kwargs):
            calls.append(args)
            if len(calls) == 3:
                raise stop("from a hook")
            return forward(*args, **kwargs)
        monkeypatch.setattr(model, "forward", stopping)
        with pytest.raises(stop, match="from a hook"):
            llm.generate([[5, 6], [7]], GREEDY)
        assert len(calls) == 3 and llm.engine.lost is None and not llm.engine.sessions
        assert llm.generate([[5, 6]], GREEDY)[0].token_ids == expected.token_ids
        assert llm.engine.scheduler.manager.pool.num_free == 64


def test_a_token_outside_the_vocabulary_fails_its_row(monkeypatch):
    for overlap in (False, True):
        with load(overlap=overlap) as llm:
            plain, calls = Prepared.read, []

            def read(step, plain=plain, calls=calls):
                output = plain(step)
                calls.append(step)
                if len(calls) == 2:
                    output.tokens[0] = 1024
                return output
            with monkeypatch.context() as patch:
                patch.setattr(Prepared, "read", read)
                outputs = llm.generate([[5, 6], [7, 8]], GREEDY)
            assert [output.finish_reason for output in outputs] == ["error", "length"]
            assert outputs[0].error == "the model returned token 1024, its vocabulary has 1024"


def test_a_closed_engine_leaves_no_thread():
    before = threading.active_count()
    with load(overlap=True) as llm:
        llm.generate([[5]], SamplingParams(max_tokens=2))
    assert threading.active_count() == before


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_waits_for_the_step_and_the_engine_goes_on(overlap, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with load(overlap=overlap, preemption="swap") as llm:
            expected = llm.generate([[5, 6]], GREEDY)[0].token_ids
            prepare, sent = llm.engine.runner.prepare_step, []

            def interrupted(*args):
                sent.append(args)
                if len(sent) == 3:
                    signal.raise_signal(signal.SIGINT)
                return prepare(*args)
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine.runner, "prepare_step", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    llm.generate([[5, 6], [7]], GREEDY)
            assert len(sent) >= 3 and not llm.engine.sessions
            assert llm.generate([[5, 6]], GREEDY)[0].token_ids == expected
            assert llm.engine.scheduler.manager.pool.num_free == 64
    finally:
        signal.signal(signal.SIGINT, before)
