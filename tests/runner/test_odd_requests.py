"""Whatever a user hands to generate(): served, or refused by one sentence, and nobody else hurt."""

from __future__ import annotations

import collections
import json
import re
import shutil

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.core import RequestError
from engine.core.params import shown
from engine.models.generation import read_sampling_defaults
from engine.prompts import PromptError, as_conversations, as_list, one_each
from engine.weights.errors import UnsupportedModel
from engine.weights.resolve import TINY

NAN, INF, HUGE = float("nan"), float("inf"), 10 ** 5000
def named(value) -> str:
    """A test's name for a value: the same in every process, so without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", shown(value))


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ODD = [None, True, 5, 2.5, NAN, INF, HUGE, 1j, b"x", bytearray(b"x"), memoryview(b"x"), object(),
       np.int64(5), np.float64(0.5), np.bool_(True), np.array(5), torch.tensor(5),
       [b"x"], [None], [True], [NAN], [2 ** 63], [HUGE], [-HUGE], [1, "x"], [[1], b"x"], [[[1]]],
       np.array([0.5]), np.array([True]), torch.tensor([0.5]), torch.tensor([[0.5]]), {}, {5: 1},
       {"prompt": None}, {"prompt": 5}, {"prompt": b"x"}, {"prompt": {"prompt": "x"}},
       {"prompt_token_ids": None}, {"prompt_token_ids": b"x"}, {"prompt_token_ids": np.int64(5)},
       {"prompt_token_ids": [True]}, {"prompt_token_ids": [HUGE]}, {HUGE: 1},
       collections.UserDict(input_ids=[1]), [collections.UserDict(input_ids=[1])]]
ODD_FIELDS = [True, 1.5, NAN, INF, HUGE, 2 ** 64, b"x", [], ["x"], {}, np.int64(1), np.array(1),
              object()]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    log = tmp_path_factory.mktemp("odd") / "run.jsonl"  # what is logged has to be writable, too
    with LLM("tiny", max_model_len=64, num_kv_blocks=32, order="priority", log=log) as llm:
        yield llm


def is_one_sentence(text: str) -> bool:
    return bool(text) and len(text) < 300 and "\n" not in text


def refused_beside_a_mate(llm, prompt, params=GREEDY) -> str:
    """The sentence of the refusal; a mate that already runs gets all its tokens."""
    mate = llm.stream([[9] * 10], GREEDY)
    first = next(mate)
    with pytest.raises(RequestError) as refused:
        llm.generate(prompt, params)
    deltas = [first, *mate]
    assert sum(len(delta.token_ids) for delta in deltas) == 6 and deltas[-1].error is None
    assert not llm.engine.scheduler.live and not llm.engine.sessions
    assert is_one_sentence(str(refused.value))
    return str(refused.value)


@pytest.mark.parametrize("prompt", ODD, ids=named)
def test_an_odd_prompt_is_refused_by_one_sentence_and_its_mates_go_on(prompt, llm):
    refused_beside_a_mate(llm, prompt)


@pytest.mark.parametrize("value", [*ODD_FIELDS, 5, "x"], ids=named)
@pytest.mark.parametrize("name", ["cache_salt", "priority"])
def test_an_odd_field_of_a_prompt_dict_is_refused_by_name(name, value, llm):
    prompt = {"prompt_token_ids": [7] * 40, name: value}
    if (name, value) in [("cache_salt", "x"), ("priority", 5)]:
        assert llm.generate(prompt, GREEDY)[0].finish_reason == "length"
    else:
        assert refused_beside_a_mate(llm, prompt).startswith(f"{name}=")


def test_none_in_a_prompt_dict_is_a_field_left_out(llm):
    ids = [7] * 40
    llm.generate([ids], GREEDY)
    (one,) = llm.generate({"prompt_token_ids": ids, "cache_salt": None, "priority": None}, GREEDY)
    assert one.num_cached_tokens == 32  # of the same salt, none: both full blocks before the last
    (salted,) = llm.generate({"prompt_token_ids": ids, "cache_salt": "s"}, GREEDY)
    assert salted.num_cached_tokens == 0 and salted.outputs[0].token_ids == one.outputs[0].token_ids


@pytest.mark.parametrize(("prompt", "sentence"), [
    (b"x", "prompts are text, token ids, dicts or a list of those, not bytes"),
    (np.int64(5), "prompts are text, token ids, dicts or a list of those, not int64"),
    (torch.tensor(5), "prompts are text, token ids, dicts or a list of those, not Tensor"),
    ([b"x"], "a prompt is text, a list of token ids or a dict, and this one is b'x' (bytes)"),
    ([HUGE], "token ids must be whole numbers below 2**63"),
    ({}, "a prompt dict has `prompt` or `prompt_token_ids`, and may have cache_salt and priority; "
         "this one has nothing"),
    (collections.UserDict(input_ids=[1], attention_mask=[1]),
     "a prompt dict has `prompt` or `prompt_token_ids`, and may have cache_salt and priority; this "
     "one has ['input_ids', 'attention_mask']"),
    ([[1], {"prompt_token_ids": [1], "cache_salt": 5}],
     "prompts[1]: cache_salt=5 must be a string"),
], ids=named)
def test_the_sentence_says_what_is_wrong_and_what_a_prompt_is(prompt, sentence, llm):
    assert refused_beside_a_mate(llm, prompt) == sentence


def test_numbers_of_any_whole_kind_are_one_prompt(llm):
    forms = [[5, 6], (5, 6), np.array([5, 6]), list(np.array([5, 6])), torch.tensor([5, 6]),
             range(5, 7), [5, np.int32(6)]]
    assert [len(as_list(form)) for form in forms] == [1] * 7
    texts = {llm.generate(form, GREEDY)[0].text for form in forms}
    assert len(texts) == 1


def test_a_setting_for_each_prompt_that_is_none_is_shown_shortly():
    with pytest.raises(Exception, match="priority must be one int.*this is <list>"):
        one_each("priority", [HUGE, "x"], 2)


# --------------------------------------------------------------------------- conversations

def test_one_conversation_and_many_are_told_apart():
    hello = {"role": "user", "content": "Hello"}
    assert as_conversations([hello, hello]) == ([[hello, hello]], False)
    assert as_conversations([[hello], (hello,)]) == ([[hello], [hello]], True)
    assert as_conversations([]) == ([], True)


@pytest.mark.parametrize("messages", [None, 5, {"role": "user"}, "Hello", b"x", np.int64(5)],
                         ids=named)
def test_what_is_no_conversation_is_refused_by_its_type(messages):
    with pytest.raises(RequestError, match=f"^messages are a list of .* lists, not "
                                           f"{type(messages).__name__}$"):
        as_conversations(messages)


def test_the_conversation_of_a_list_that_is_none_is_named():
    with pytest.raises(PromptError) as refused:
        as_conversations([[{"role": "user", "content": "Hello"}], 5])
    assert str(refused.value) == ("prompts[1]: a conversation is a list of messages, and this one "
                                  "is 5 (int)")


# --------------------------------------------------------------------------- parameters that run

@pytest.mark.parametrize("params", [
    dict(temperature=1e308, logit_bias={token: -INF for token in range(1, 1024)}),
    dict(temperature=1e39, logit_bias={token: -INF for token in range(1, 1024)}, top_p=0.5),
    dict(temperature=1e-5, logit_bias={0: 1e20}, repetition_penalty=1e-6),
    dict(temperature=1.0, logit_bias={0: 1e20}, repetition_penalty=1e-6, min_p=1.0, top_k=2 ** 63),
    dict(temperature=0.0, logit_bias={0: 1e20}, seed=-2 ** 63)], ids=lambda p: shown(list(p)))
def test_the_largest_allowed_values_draw_the_only_token_they_leave(params, llm):
    (out,) = llm.generate([[5] * 20], SamplingParams(max_tokens=4, ignore_eos=True, **params))
    assert (out.finish_reason, out.error, out.token_ids) == ("length", None, [0] * 4)


def test_end_tokens_that_the_vocabulary_does_not_have_forbid_nothing(tmp_path):
    target = shutil.copytree(TINY, tmp_path / "model")
    path = target / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 5000, -1]}))
    with LLM(target, max_model_len=64, num_kv_blocks=32) as llm:
        last = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4, logit_bias={1023: 1e20})
        mate, short = llm.generate([[9] * 10, [5] * 20], [GREEDY, last])
        assert mate.error is None and len(mate.token_ids) == 6
        assert short.token_ids == [1023] * 4  # -1 is not the last token


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                                  "max_new_tokens", "do_sample"])
def test_an_odd_value_of_the_models_own_defaults_is_named_with_the_file(name, tmp_path):
    path = tmp_path / "generation_config.json"
    for value in (True, "x", [1], {"a": 1}, [], {}, -5, NAN, -INF, 10 ** 400):
        if name == "do_sample" and value is True:
            continue
        path.write_text(json.dumps({name: value}))
        with pytest.raises(UnsupportedModel) as refused:
            read_sampling_defaults(tmp_path)
        ours = "max_tokens" if name == "max_new_tokens" else name
        assert str(refused.value).startswith(f"{path}: {ours}="), value


@pytest.mark.parametrize("value", [True, 5, {"a": 1}, [5], [""], "", [["x"]]], ids=named)
def test_stop_strings_of_the_models_own_that_are_none_are_named(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": value}))
    with pytest.raises(UnsupportedModel, match="generation_config.json: stop=.* must"):
        read_sampling_defaults(tmp_path)
