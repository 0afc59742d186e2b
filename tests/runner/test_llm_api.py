"""LLM as its users call it: results, streams, refusals, tiny pools, several engines."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.batch import RowFailed
from engine.core.block_pool import BlockPool
from engine.core.errors import ConfigError, RequestError, TandemError
from engine.core.events import read_log
from engine.core.policies import Fcfs
from engine.mistakes import reason_of
from engine.prompts import PromptError
from engine.runner.sizing import TandemWarning
from engine.weights.errors import UnsupportedModel
from engine.weights.resolve import resolve_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The fox", "Once upon a time there was", "Ada", "Day 1, Monday. It was"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", max_num_seqs=8, num_kv_blocks=256, max_model_len=512)


@pytest.fixture(autouse=True)
def no_block_stays_in_use(llm):
    yield
    pool = llm.engine.scheduler.manager.pool
    assert pool.num_free == 256 and not llm.engine.sessions


def load_tiny(**options) -> LLM:
    return LLM("tiny", **{"max_model_len": 96, "num_kv_blocks": 64, "dtype": "float64", **options})


def workload(number: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Token-id prompts and params, half greedy and half sampled, with common prefixes."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 1000) for _ in range(20)]
    prompts = [shared[:rng.choice([0, 0, 10, 20])]
               + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 30))] for _ in range(number)]
    params = [SamplingParams(
        temperature=0.9 if n % 2 else 0.0, max_tokens=rng.randint(1, 40), seed=n, ignore_eos=True,
        top_k=rng.choice([0, 20])) for n in range(number)]
    return prompts, params


def ids_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# ------------------------------------------------------------------------------------- results

def test_a_result_reads_as_an_object_and_as_a_dict(llm):
    (out,) = llm.generate(PROMPTS[0], GREEDY)
    assert out.text == out["text"] == out.outputs[0].text != ""
    assert out.token_ids == out["token_ids"] and len(out.token_ids) == 12
    assert out.finish_reason == "length" and out.error is None
    assert out.prompt == PROMPTS[0]
    assert out.prompt_token_ids == llm.tokenizer(PROMPTS[0])["input_ids"]
    assert 0 < out.ttft < out.e2e
    with pytest.raises(KeyError):
        out["nothing"]


def test_text_ids_and_dict_prompts_of_one_content_give_one_result(llm):
    ids = llm.tokenizer(PROMPTS[1])["input_ids"]
    forms = [PROMPTS[1], ids, np.array(ids), torch.tensor(ids), {"prompt": PROMPTS[1]},
             {"prompt_token_ids": ids, "cache_salt": "x"}]
    texts = {llm.generate([form], GREEDY)[0].text for form in forms}
    assert len(texts) == 1
    for one_prompt in (ids, np.array(ids)):
        (out,) = llm.generate(one_prompt, GREEDY)
        assert out.text in texts and out.prompt is None


def test_results_come_in_the_order_of_the_prompts_with_their_own_params(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.token_ids) for output in outputs] == [9, 1, 5, 3]
    assert [output.prompt for output in outputs] == PROMPTS


def test_a_second_run_finds_the_prompt_in_the_cache_and_says_the_same(llm):
    prompt = "Ada lived in the wood near Windhill, where it was windy. " * 4
    llm.engine.scheduler.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(first.prompt_token_ids) - 1) // 16 * 16
    assert second.token_ids == first.token_ids


def test_n_samples_share_the_prompt_differ_and_repeat_with_the_seed(llm):
    params = SamplingParams(temperature=1.2, max_tokens=10, n=3, seed=4, ignore_eos=True)
    first, second = (llm.generate(PROMPTS[1], params)[0] for _ in range(2))
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 3
    assert [s.token_ids for s in first.outputs] == [s.token_ids for s in second.outputs]
    (alone,) = llm.generate(PROMPTS[1], SamplingParams(temperature=1.2, max_tokens=10, seed=4,
                                                       ignore_eos=True))
    assert alone.token_ids == first.outputs[0].token_ids


def test_a_stop_string_ends_the_request_and_is_cut_off(llm):
    (free,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40))
    stop = free.text[15:19]
    cut = free.text.index(stop)
    (out,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, stop=stop))
    assert (out.text, out.finish_reason) == (free.text[:cut], "stop")
    assert out.outputs[0].stop_reason == stop
    assert len(out.token_ids) < len(free.token_ids)
    (kept,) = llm.generate(PROMPTS[0], SamplingParams(
        temperature=0.0, max_tokens=40, stop=[stop], include_stop_str_in_output=True))
    assert kept.text == free.text[:cut + len(stop)]


def test_a_stop_token_ends_the_request_and_min_tokens_puts_it_off(llm):
    (free,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=20))
    token = free.token_ids[3]
    params = {"temperature": 0.0, "max_tokens": 20, "stop_token_ids": (token,)}
    (out,) = llm.generate(PROMPTS[1], SamplingParams(**params))
    end = free.token_ids.index(token) + 1
    assert (out.token_ids, out.finish_reason) == (free.token_ids[:end], "stop")
    assert out.outputs[0].stop_reason == token
    (later,) = llm.generate(PROMPTS[1], SamplingParams(min_tokens=10, **params))
    assert token not in later.token_ids[:10] and len(later.token_ids) >= 10


def test_logprobs_come_one_a_token_with_the_chosen_one_among_them(llm):
    (out,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
    sample = out.outputs[0]
    assert len(sample.logprobs) == 5
    for token, candidates in zip(sample.token_ids, sample.logprobs, strict=True):
        assert candidates[token].rank == 1 and candidates[token].logprob <= 0.0
    total = sum(entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs,
                                                             strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)


def test_chat_is_the_template_and_then_generate(llm):
    messages = [{"role": "user", "content": "Who is Ada?"}]
    (out,) = llm.chat(messages, GREEDY)
    rendered = llm.tokenizer.apply_chat_template(messages, tokenize=False,
                                                 add_generation_prompt=True)
    assert llm.tokenizer.decode(out.prompt_token_ids) == rendered
    assert ids_of(llm.chat([messages, messages], GREEDY)) == [out.token_ids] * 2


@pytest.mark.parametrize("message, found", [({"role": "user"}, "has role"), ({}, "has nothing")])
def test_a_message_without_content_is_refused_in_one_sentence(message, found, llm):
    with pytest.raises(RequestError, match=f'messages.1. has no "content".*{found}'):
        llm.chat([{"role": "user", "content": "Hello"}, message])


# ------------------------------------------------------------------------------------- streams

def test_the_deltas_of_a_stream_join_to_what_generate_returns(llm):
    params = SamplingParams(temperature=0.0, max_tokens=15, n=2, stop="zzz")
    outputs = llm.generate(PROMPTS, params)
    texts: dict = {}
    ends: dict = {}
    for delta in llm.stream(PROMPTS, params):
        key = (delta.request_id, delta.index)
        assert key not in ends, "a delta after the last one"
        texts[key] = texts.get(key, "") + delta.text
        if delta.finish_reason:
            ends[key] = delta.finish_reason
    assert list(texts.values()) and sorted(texts.values()) == sorted(
        sample.text for output in outputs for sample in output.outputs)
    assert len(ends) == 8


def test_a_stream_left_early_aborts_its_request(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.scheduler.has_unfinished()


@pytest.mark.parametrize("let_go", [lambda streams: streams.pop().close(), list.clear])
def test_a_stream_that_nobody_reads_takes_its_request_with_it(let_go, llm):
    streams = [llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))]
    llm.generate(PROMPTS[1], GREEDY)  # the stream's request decodes beside it
    let_go(streams)
    assert not llm.engine.scheduler.has_unfinished()
    steps = llm.engine.scheduler.num_steps
    llm.generate(PROMPTS[1], GREEDY)
    assert llm.engine.scheduler.num_steps - steps <= GREEDY.max_tokens + 1


def test_a_stream_let_go_after_its_engine_closed_leaves_the_engine_alone():
    with load_tiny() as engine:
        stream = engine.stream(PROMPTS[0], GREEDY)
    steps = engine.engine.scheduler.num_steps
    stream.close()
    assert engine.engine.scheduler.num_steps == steps


def test_the_last_delta_of_an_aborted_request_says_so(llm):
    reasons = []
    for delta in llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)):
        reasons.append(delta.finish_reason)
        llm.engine.abort(delta.request_id)
    assert reasons[-1] == "abort" and len(reasons) <= 4


def test_two_streams_and_a_generate_share_the_engine(llm):
    expected = {name: llm.generate(name, GREEDY)[0].text for name in PROMPTS[:3]}
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    texts = [next(first).text, next(second).text]
    assert llm.generate(PROMPTS[2], GREEDY)[0].text == expected[PROMPTS[2]]
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert texts == [expected[PROMPTS[0]], expected[PROMPTS[1]]]


# ------------------------------------------------------------------------------------ refusals

@pytest.mark.parametrize("prompt, named", [
    ("", "the prompt is empty"), ([[]], "the prompt is empty"),
    ([[5] * 512], "512 tokens.*max_model_len is 512"), ([5, 1024], "token id 1024.*1024 tokens"),
    ([-1, 5], "token id -1"), ({"promt": "x"}, "a prompt dict has"),
    ([[1, 2.5]], "a prompt is text.*list"), ([None], "a prompt is text.*NoneType"),
    ({"prompt": "x", "prompt_token_ids": [1]}, "a prompt dict has")])
def test_a_bad_prompt_is_refused_by_name_and_the_engine_goes_on(prompt, named, llm):
    with pytest.raises(RequestError, match=named):
        llm.generate(prompt, GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason == "length"


def test_nothing_runs_when_one_of_several_prompts_is_refused(llm):
    steps = llm.engine.scheduler.num_steps
    with pytest.raises(RequestError, match="token id 5000"):
        llm.generate([PROMPTS[0], [1, 5000], PROMPTS[1]], GREEDY)
    assert not any(len(r.output_tokens) for r in llm.engine.scheduler.running)
    assert llm.engine.scheduler.num_steps - steps <= 3


def test_bad_params_are_refused_by_name(llm):
    with pytest.raises(RequestError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="logit_bias id 4000"):
        llm.generate(PROMPTS[0], SamplingParams(logit_bias={4000: 1.0}))
    with pytest.raises(RequestError, match="stop token id 4000"):
        llm.generate(PROMPTS[0], SamplingParams(stop_token_ids=(4000,)))
    with pytest.raises(ConfigError, match="4 prompts and 2 sampling_params"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_an_unknown_setting_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM("tiny", max_num_sequences=3)


# ------------------------------------------------------------------------- what must not matter

@pytest.mark.parametrize("options", [
    {"num_kv_blocks": 24, "block_size": 4},
    {"num_kv_blocks": 24, "block_size": 4, "preemption": "swap"},
    {"max_num_batched_tokens": 7, "block_size": 8},
    {"max_num_seqs": 1}, {"batching": "prefill_first"}, {"enable_prefix_caching": False},
    {"long_prefill_token_threshold": 5, "order": "sjf", "block_size": 2}],
    ids=["preempted", "swapped", "chunked", "alone", "prefill first", "no cache", "sjf"])
def test_greedy_and_seeded_tokens_depend_on_nothing_but_the_request(options):
    prompts, params = workload(10)
    expected = ids_of(load_tiny().generate(prompts, params))
    engine = load_tiny(**{"max_num_seqs": 8, **options})
    assert engine.config.max_model_len > max(len(p) + o.max_tokens for p, o in zip(prompts, params))
    outputs = engine.generate(prompts, params)
    assert ids_of(outputs) == expected
    if options.get("num_kv_blocks") == 24:
        assert sum(output.outputs[0].num_preemptions for output in outputs) > 0
    pool = engine.engine.scheduler.manager.pool
    assert pool.num_free == engine.engine.scheduler.config.num_blocks
    assert engine.engine.scheduler.reset_prefix_cache()


def test_two_engines_in_one_process_do_not_know_each_other():
    prompts, params = workload(4)
    first, second = load_tiny(), load_tiny(block_size=4)
    streams = [first.stream(prompts, params), second.stream(prompts, params)]
    ids: list[dict] = [{}, {}]
    while streams[0] or streams[1]:
        for number, stream in enumerate(streams):
            delta = next(stream, None) if stream else None
            if delta is None:
                streams[number] = None
            else:
                ids[number].setdefault(delta.request_id, []).extend(delta.token_ids)
    assert ids[0] == ids[1]


def test_policy_objects_reach_the_scheduler():
    class LastFirst(Fcfs):
        def key(self, request, manager):
            return -request.seq

    engine = load_tiny(scheduler_options={"order": LastFirst()}, max_num_seqs=1)
    finished = [delta.request_id for delta in engine.stream([[5], [6], [7]], GREEDY)
                if delta.finish_reason]
    assert finished == ["r2", "r1", "r0"]


@pytest.mark.parametrize(("options", "sentence"), [
    ({"bogus": 1}, "scheduler_options has no 'bogus': there are batching, order, preemption, "
                   "eviction, pool, emit"),
    ({"evicton": None}, "scheduler_options has no 'evicton': did you mean eviction?"),
    ({"batching": 3}, "scheduler_options['batching'] must be an object with fill(), refuses(), and "
                      "3 (int) has no fill()"),
    ({"order": "sjf"}, "scheduler_options takes objects: for a policy by its name give LLM "
                       "order='sjf' itself"),
    ({"order": Fcfs}, "scheduler_options['order'] must be an object, and Fcfs is a class: give "
                      "Fcfs()"),
    ({"pool": 7}, "scheduler_options['pool'] must be an object with take(), share(), release(), "
                  "and 7 (int) has no take()"),
    ({"emit": 3}, "scheduler_options['emit'] must be a function of (kind, **fields), not 3 (int)"),
    (5, "scheduler_options must be a dict of objects by name (batching, order, preemption, "
        "eviction, pool, emit), not 5 (int)")])
def test_parts_that_cannot_work_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(ConfigError) as caught:
        load_tiny(scheduler_options=options)
    assert str(caught.value) == sentence


def test_a_refused_prompt_is_named_by_its_place(llm):
    with pytest.raises(PromptError, match=r"^prompts\[1\]: the prompt is empty; give at") as one:
        llm.generate([[5], [], [6]])
    assert (one.value.index, one.value.reason) == (1, "the prompt is empty; give at least 1 token")
    with pytest.raises(PromptError, match="^a prompt dict has `prompt` or"):
        llm.generate({"promt": "x"})
    with pytest.raises(PromptError, match=r"^prompts\[1\]: messages\[0\] has no .content."):
        llm.chat([[{"role": "user", "content": "a"}], [{"role": "nobody"}]])
    assert not llm.engine.sessions


def test_a_pool_of_the_users_own_serves_the_engine():
    class Counting(BlockPool):
        taken = 0

        def take(self, num_blocks):
            self.taken += num_blocks
            return super().take(num_blocks)

    pool = Counting(64)
    engine = load_tiny(num_kv_blocks=64, scheduler_options={"pool": pool})
    prompts, params = workload(6)
    assert ids_of(engine.generate(prompts, params)) == ids_of(load_tiny().generate(prompts, params))
    assert pool.taken > 20 and pool.num_free == 64


# ------------------------------------------------------------------------------- faults and logs

def test_a_row_that_fails_ends_its_request_alone(llm, monkeypatch):
    run = llm.engine.runner.run

    def faulty(batch):
        output = run(batch)
        for index, request in enumerate(batch.requests):
            if request.id.endswith("bad") and len(request.output_tokens) == 2:
                output.tokens[index] = RowFailed("the model computed NaN logits for this request")
        return output

    monkeypatch.setattr(llm.engine.runner, "run", faulty)
    from engine.core.request import Request
    sessions = [llm.engine.submit(Request(name, [4, 5, 6], GREEDY, arrival_time=0.0))
                for name in ("good", "bad")]
    while llm.engine.step():
        pass
    reasons = [session.request.finish_reason for session in sessions]
    assert reasons == ["length", "error"]
    assert "NaN" in sessions[1].inbox[-1].error
    for session in sessions:
        llm.engine.close(session)


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(llm, monkeypatch):
    def broken(batch):
        raise MemoryError("no memory for 3 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", broken)
        outputs = llm.generate(PROMPTS[:2], GREEDY)
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert outputs[0].error == "the step failed: MemoryError: no memory for 3 GiB"
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason == "length"


def test_the_log_tells_the_run_and_its_circumstances(tmp_path):
    path = tmp_path / "run.jsonl"
    with load_tiny(log=path, seed=5) as engine:
        (out,) = engine.generate("The fox", GREEDY)
        with pytest.raises(RequestError):
            engine.generate([[9999]], GREEDY)
        engine.generate("Ada", GREEDY)
    log = read_log(path)
    assert log.problem is None
    header = log.header
    assert (header["mode"], header["seed"], header["config"]["num_blocks"]) == ("real", 5, 64)
    assert header["model"]["num_hidden_layers"] == 4 and header["model"]["dtype"] == "float64"
    assert header["hardware"]["threads"] == torch.get_num_threads()
    assert header["hardware"]["tp"] == 1 and "graphs" not in header["hardware"]  # of CUDA only
    assert header["versions"]["torch"] == torch.__version__
    tokens = [event["tokens"][0] for event in log.events if event["e"] == "token"]
    assert [token for token in tokens if token is not None][:12] == out.token_ids
    kinds = {event["e"] for event in log.events}
    assert {"arrive", "step_begin", "batch", "time", "token", "finish", "reject"} <= kinds
    times = [event for event in log.events if event["e"] == "time"]
    assert all(event["seconds"] > 0 and event["source"] == "measured" for event in times)


def test_a_log_that_cannot_be_written_is_a_named_error():
    with pytest.raises(ConfigError, match="no event log is written: /no/such/dir/run.jsonl is not"):
        load_tiny(log="/no/such/dir/run.jsonl")


def test_a_small_pool_lowers_the_longest_request_and_still_serves():
    with pytest.warns(TandemWarning, match="lowered from 96 to 32"):
        engine = load_tiny(num_kv_blocks=2)
    (out,) = engine.generate([[5] * 20], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(out.token_ids) == 12 and out.finish_reason == "length"


def test_a_directory_without_tokenizer_serves_token_ids_and_says_so_for_text(tmp_path):
    directory = shutil.copytree(resolve_model("tiny"), tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).unlink(missing_ok=True)
    engine = LLM(directory, max_model_len=64)
    (out,) = engine.generate([[5, 6, 7]], GREEDY)
    assert out.text == "" and len(out.token_ids) > 0
    with pytest.raises(RequestError, match="has no tokenizer"):
        engine.generate("hello", GREEDY)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.generate([[5]], SamplingParams(stop="x"))


def test_a_damaged_tokenizer_is_a_named_error(tmp_path):
    directory = shutil.copytree(resolve_model("tiny"), tmp_path / "bad")
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(TandemError, match="tokenizer of .* cannot be read"):
        LLM(directory)


@pytest.mark.parametrize("field, value, reason", [
    ("rms_norm_eps", 0, "Field 'rms_norm_eps' expected float, got int (value: 0)"),
    ("max_position_embeddings", None, "Field 'max_position_embeddings' expected int, got NoneType"),
    ("use_cache", "yes", "Field 'use_cache' expected bool, got str (value: 'yes')")])
def test_a_config_that_only_transformers_refuses_is_named_with_its_whole_reason(
        field, value, reason, tmp_path):
    directory = shutil.copytree(resolve_model("tiny"), tmp_path / "odd")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(UnsupportedModel) as raised:
        LLM(directory)
    said = str(raised.value)
    assert said.startswith(f"{directory}/config.json: transformers") and reason in said
    assert "\n" not in said and said.endswith("correct that field")


@pytest.mark.parametrize("error, said", [
    (ValueError("first.\nsecond"), "first"), (ValueError("field:\n\n   why  not\nmore"),
                                             "field: why not"),
    (KeyError("no such key"), "no such key"), (ValueError("only:"), "only:"),
    (RuntimeError(), "RuntimeError"), (KeyError(), "KeyError")])
def test_a_librarys_reason_is_its_first_line_and_what_that_announces(error, said):
    assert reason_of(error) == said


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, [3]])
def test_params_that_are_none_are_refused_in_a_sentence(llm, params):
    with pytest.raises(ConfigError, match="sampling_params must be one SamplingParams for all"):
        llm.generate(["x"], params)


@pytest.mark.parametrize("logged", [False, True])
def test_an_engine_that_is_closed_says_so(tmp_path, logged):
    with LLM("tiny", log=tmp_path / "a.jsonl" if logged else None) as closed:
        pass
    with pytest.raises(RequestError, match="this engine is closed; make a new one"):
        closed.generate("x", SamplingParams(max_tokens=2))


def test_a_model_that_cannot_be_loaded_leaves_the_log_of_another_run_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text("precious\n")
    with pytest.raises(TandemError):
        LLM("tiny", max_model_len=10**9, log=tmp_path / "a.jsonl")
    with pytest.raises(RequestError), LLM("tiny", log=tmp_path / "a.jsonl") as llm:
        llm.generate("x" * 5000)
    assert (tmp_path / "a.jsonl").read_text() == "precious\n"
