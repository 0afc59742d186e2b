"""Every field of a request with values of every odd kind: refused by one sentence when it is said,
or harmless. Nothing gets as far as a step, where it would hurt the others."""

from __future__ import annotations

import io
import re
from dataclasses import fields

import numpy as np
import pytest

from engine.core import Request, RequestError, SamplingParams
from engine.core.events import EventLog
from engine.core.params import shown
from tests.core.helpers import config, request, run, scheduler, submit

NAN, INF = float("nan"), float("inf")
def named(value) -> str:
    """A test's name for a value: the same in every process, so without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", shown(value))


HUGE = 10 ** 5000  # has no decimal digits: Python refuses to write them
ODD = [None, True, False, "", "x", "5", b"x", bytearray(b"x"), [], [1], ["x"], [None], [b"x"],
       [True], [NAN], [1.5], [HUGE], [[1, 2]], {}, {"a": 1}, {5: "x"}, {5: None}, {5: NAN},
       {5: INF}, {5: 1e300}, {5: [1]}, {"5": 1.0}, {5.7: 1.0}, {True: 1.0}, {HUGE: 1.0},
       [(5,)], [(5, 1.0, 2.0)], [5, 1.0], set(), {3}, (), 0, 1, -1, 2.5, NAN, INF, -INF, 1e308,
       10 ** 300, 2 ** 63, 2 ** 64, -2 ** 64, HUGE, -HUGE, 1j, object(), np.int64(5),
       np.float64(0.5), np.float32(0.5), np.bool_(True), np.float64("nan"), np.str_("x"),
       np.array([1, 2]), np.array(5), np.array(["x"])]
NAMES = [field.name for field in fields(SamplingParams)]


def is_one_sentence(text: str) -> bool:
    return len(text) < 300 and "\n" not in text


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_parameter_is_refused_by_name_or_harmless(name):
    """Harmless: it can be logged, compared and made again from the log."""
    for value in ODD:
        try:
            params = SamplingParams(**{"max_tokens": 2, name: value})
        except RequestError as error:
            assert str(error).startswith(name) and is_one_sentence(str(error)), error
            continue
        log = EventLog(io.StringIO(), {})
        one = scheduler(emit=log.emit)
        submit(one, Request("odd", [1, 2], params, eos_ids=(3,)), request("mate", [3, 4], 2))
        run(one)
        assert not one.live


@pytest.mark.parametrize(("name", "good"), [
    ("temperature", [0, 1, np.float64(0.5), 1e308]), ("top_k", [2 ** 64 - 1]),
    ("seed", [None, -2 ** 63, 2 ** 64 - 1]), ("ignore_eos", [True, False]),
    ("include_stop_str_in_output", [True, False]),
    ("stop", [None, "x", ["x"], {"x"}, np.str_("x")]),
    ("stop_token_ids", [None, [], [0, 5], {3}, range(2)]),
    ("logit_bias", [None, {}, {5: 1}, {5: -INF}, [(5, -1e20)], [[0, 1e20]]])])
def test_values_that_mean_something_are_taken(name, good):
    for value in good:
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("given", "entry"), [
    ({5: "abc"}, "(5, 'abc')"), ({5: [1]}, "(5, [1])"), ({5: None}, "(5, None)"),
    ({5: NAN}, "(5, nan)"), ({5: INF}, "(5, inf)"), ({5: 1.1e20}, "(5, 1.1e+20)"),
    ({5: True}, "(5, True)"), ({5: -1.1e20}, "(5, -1.1e+20)"), ([(5,)], "(5,)"),
    ([(5, 1.0, 2.0)], "(5, 1.0, 2.0)"), ({"5": 1.0}, "('5', 1.0)"), ({5.7: 1.0}, "(5.7, 1.0)"),
    ({True: 1.0}, "(True, 1.0)"), (["ab"], "'ab'"), ([5], "5"),
    ({1: 1.0, 2: 2.0, 3: "x"}, "(3, 'x')")], ids=named)
def test_a_bias_that_is_none_is_named(given, entry):
    with pytest.raises(RequestError) as refused:
        SamplingParams(logit_bias=given)
    assert str(refused.value) == (
        f"logit_bias holds {entry}: an entry must be a token id and a number in [-1e+20, 1e+20], "
        f"or -inf to forbid the token")


def test_biases_are_kept_as_pairs_whatever_they_came_in():
    assert SamplingParams(logit_bias=[[5, 1], (6, -INF)]).logit_bias == ((5, 1), (6, -INF))
    assert hash(SamplingParams(logit_bias=[[5, 1]])) == hash(SamplingParams(logit_bias={5: 1}))


@pytest.mark.parametrize(("name", "value", "sentence"), [
    ("seed", 2 ** 64, "seed=18446744073709551616 must fit in 64 bits"),
    ("seed", HUGE, "seed=<int> must fit in 64 bits"),
    ("ignore_eos", 1, "ignore_eos=1 must be True or False"),
    ("include_stop_str_in_output", None, "include_stop_str_in_output=None must be True or False"),
    ("stop", b"x", "stop=b'x' must be a list"), ("stop", {"a": 1}, "stop={'a': 1} must be a list"),
    ("stop", 0, "stop=0 must be a list"), ("stop", [5], "stop=(5,) must hold non-empty strings"),
    ("stop_token_ids", b"ab", "stop_token_ids=b'ab' must be a list"),
    ("stop_token_ids", "12", "stop_token_ids='12' must be a list"),
    ("stop_token_ids", [2 ** 64], "stop_token_ids=(18446744073709551616,) must hold whole numbers"),
    ("logit_bias", "ab", "logit_bias='ab' must be a list"),
    ("temperature", NAN, "temperature=nan must be a number"),
    ("top_p", 2 ** 64, "top_p=18446744073709551616 must be a number")], ids=named)
def test_the_sentence_has_the_name_the_value_and_the_rule(name, value, sentence):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert str(refused.value) == sentence


def test_a_value_is_shown_on_one_line_and_cut():
    assert shown("x" * 78) == repr("x" * 78)
    assert shown("x" * 79) == "'" + "x" * 76 + "..."
    assert shown(np.array([[1], [2]])) == "array([[1],        [2]])"
    assert shown(HUGE) == "<int>" and shown([HUGE]) == "<list>"


# --------------------------------------------------------------------------- the request's own

REQUEST = ["priority", "arrival_time", "deadline", "cache_salt", "keys", "parent", "received"]


@pytest.mark.parametrize("order", ["fcfs", "priority", "sjf", "longest_prefix"])
@pytest.mark.parametrize("name", REQUEST)
def test_an_odd_field_is_refused_at_submit_or_harmless(name, order):
    for value in ODD:
        if name == "keys" and isinstance(value, list) and HUGE in value:
            continue  # a workload's author may name blocks as he likes, but has to write the names
        log = EventLog(io.StringIO(), {})
        one = scheduler(emit=log.emit, order=order)
        mate = request("mate", [1, 2, 3, 4, 5], 3)
        submit(one, mate)
        try:
            submit(one, request("odd", [1, 2, 3, 4, 6], 3, **{name: value}))
        except RequestError as error:
            assert is_one_sentence(str(error)) and str(error).startswith("request odd: "), error
        run(one)
        assert mate.finish_reason == "length" and not one.live


@pytest.mark.parametrize(("fields", "sentence"), [
    (dict(cache_salt=5), "cache_salt=5 must be a string"),
    (dict(cache_salt=b"x"), "cache_salt=b'x' must be a string"),
    (dict(priority=HUGE), "priority=<int> must be a whole number of at most 64 bits"),
    (dict(deadline="soon"), "deadline='soon' must be a number of seconds"),
    (dict(deadline=NAN), "deadline=nan must be a number of seconds"),
    (dict(arrival_time=None), "arrival_time=None must be a number of seconds"),
    (dict(keys=5), "keys=5 must be a list"), (dict(keys={1, 2}), "keys={1, 2} must be a list"),
    (dict(parent="p"), "parent='p' must be a Request"),
    (dict(eos_ids=("x",)), "stop ids=frozenset({'x'}) must be whole numbers"),
    (dict(received="1"), "received='1' must be a whole number from 0 to 1: the last token is "
                         "always computed here")], ids=named)
def test_a_field_that_a_step_could_not_read_is_named_at_submit(fields, sentence):
    with pytest.raises(RequestError) as refused:
        scheduler().submit(request("r", [1, 2], **fields))
    assert str(refused.value) == f"request r: {sentence}"


def test_parameters_that_only_look_like_some_are_refused():
    class Loose:
        stop_token_ids, ignore_eos, max_tokens = (), False, "5"

    with pytest.raises(RequestError, match="request r: params=.* must be SamplingParams"):
        scheduler().submit(Request("r", [1], Loose()))


def test_no_salt_is_the_empty_salt():
    salts = [request("r", [1], cache_salt=salt).cache_salt for salt in (None, "", "s")]
    assert salts == ["", "", "s"]


@pytest.mark.parametrize("name", [None, 5, b"r", ("r",), [1], HUGE, {(1,): 2}], ids=named)
def test_an_id_that_is_no_string_is_refused_at_once(name):
    with pytest.raises(RequestError, match="^request id .* must be a string$"):
        Request(name, [1], SamplingParams())


def test_a_prompt_of_an_unspeakable_length_is_refused_with_a_sentence():
    with pytest.raises(RequestError, match="the prompt has <int> tokens and needs room"):
        scheduler().submit(request("r", HUGE))
    assert config().max_model_len == 256
