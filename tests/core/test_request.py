"""What a request is, what is refused before it touches anything, and content keys."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from engine.core import ConfigError, Request, RequestError, RequestStatus, SamplingParams
from engine.core.config import SchedulerConfig
from engine.core.intake import arrival_fields, check_request
from engine.core.request import FINISH_REASONS, extend_keys, num_given_keys
from tests.core.helpers import config, events, request, results, rows, scheduler, step, submit
from tests.core.recorder import Recorder

# --------------------------------------------------------------------------- sampling parameters

GOOD = [
    dict(temperature=0.0), dict(temperature=1e308), dict(top_k=-1), dict(top_k=0), dict(top_k=1),
    dict(top_p=1.0), dict(top_p=1e-9), dict(min_p=0.0), dict(min_p=1.0),
    dict(repetition_penalty=1e-6), dict(repetition_penalty=1e6),
    dict(presence_penalty=-2.0), dict(presence_penalty=2.0),
    dict(frequency_penalty=-2.0), dict(frequency_penalty=2.0), dict(logprobs=0),
    dict(logprobs=20), dict(n=1), dict(n=16384), dict(max_tokens=1), dict(max_tokens=None),
    dict(min_tokens=3, max_tokens=3), dict(min_tokens=9, max_tokens=None), dict(stop=("a",))]

BAD = [
    dict(temperature=-0.1), dict(temperature=float("nan")), dict(temperature=float("inf")),
    dict(top_k=-2), dict(top_p=0.0), dict(top_p=1.01), dict(top_p=float("nan")), dict(min_p=-0.1),
    dict(min_p=1.1), dict(repetition_penalty=9e-7), dict(repetition_penalty=1.1e6),
    dict(presence_penalty=2.1), dict(presence_penalty=-2.1), dict(frequency_penalty=2.1),
    dict(frequency_penalty=-2.1), dict(logprobs=-1), dict(logprobs=21), dict(n=0), dict(n=16385),
    dict(max_tokens=0), dict(max_tokens=-1), dict(min_tokens=-1), dict(min_tokens=4, max_tokens=3),
    dict(stop=("",)), dict(stop=("a", ""))]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_values_on_the_border_of_the_allowed_are_taken(fields):
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_values_past_the_border_are_refused_with_name_value_and_rule(fields):
    name, value = list(fields.items())[0]
    with pytest.raises(RequestError) as refused:
        SamplingParams(**fields)
    assert str(refused.value).startswith(f"{name}={value!r} must")


@pytest.mark.parametrize(("fields", "rule"), [
    (dict(max_tokens=1.0), "must be a whole number"), (dict(top_k=True), "must be a whole number"),
    (dict(n="2"), "must be a whole number"), (dict(min_tokens=None), "must be a whole number"),
    (dict(logprobs=1.5), "must be a whole number"), (dict(seed="s"), "must be a whole number"),
    (dict(temperature="0"), "must be a number"), (dict(top_p=None), "must be a number"),
    (dict(min_p=[1]), "must be a number"), (dict(repetition_penalty="1"), "must be a number"),
    (dict(presence_penalty=True), "must be a number"),
    (dict(frequency_penalty="0"), "must be a number"),
    (dict(stop_token_ids=(1, "2")), "must hold whole numbers")], ids=str)
def test_values_of_the_wrong_type_are_refused_by_name(fields, rule):
    (name, value), = fields.items()
    with pytest.raises(RequestError) as refused:
        SamplingParams(**fields)
    assert str(refused.value) == f"{name}={value!r} {rule}"


@pytest.mark.parametrize("priority", [1.5, "1", None, True])
def test_a_priority_that_is_no_whole_number_is_refused_at_submit(priority):
    with pytest.raises(RequestError, match="request r: priority=.* must be a whole number"):
        scheduler().submit(request("r", [1], priority=priority))


def test_parameters_cannot_be_changed_and_so_may_be_shared():
    """nano-vllm's default parameters were one object that any caller could change for all."""
    shared = SamplingParams(max_tokens=3)
    a, b = Request("a", [1], shared), Request("b", [1], shared)
    with pytest.raises(FrozenInstanceError):
        a.params.max_tokens = 9
    assert b.params.max_tokens == 3 and a.children is not b.children


def test_max_tokens_0_is_refused_and_says_why():
    with pytest.raises(RequestError, match="max_tokens=0 must be at least 1: a request for no "
                                           "tokens has nothing to do"):
        SamplingParams(max_tokens=0)


def test_one_stop_string_and_a_dict_of_biases_are_read_as_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], logit_bias={5: -1.0})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == ((5, -1.0),)
    assert SamplingParams(stop=None).stop == ()


# --------------------------------------------------------------------------- the request

def test_a_new_request_waits_with_nothing_computed_and_nothing_held():
    fresh = Request("r", [5, 6, 7], SamplingParams(max_tokens=4), eos_ids=(2,), user="mine")
    assert (fresh.num_prompt, fresh.num_tokens) == (3, 3)
    assert (fresh.num_computed, fresh.num_output) == (0, 0)
    assert fresh.status is RequestStatus.WAITING and not fresh.finished
    assert (fresh.block_table, fresh.cpu_table, fresh.output_tokens) == ([], [], [])
    assert (fresh.finish_reason, fresh.error, fresh.user) == (None, None, "mine")
    assert fresh.stop_ids == {2}
    assert (fresh.seq, fresh.arrival_time, fresh.priority) == (-1, 0.0, 0)
    assert (fresh.writable, fresh.num_published, fresh.num_hit, fresh.num_preemptions) == (
        0, 0, 0, 0)
    assert repr(fresh) == "Request(r, waiting, 0/3 computed, 0 blocks)"


def test_ignore_eos_drops_the_eos_ids_and_keeps_the_stop_token_ids():
    params = SamplingParams(stop_token_ids=(8,), ignore_eos=True)
    assert Request("r", [1], params, eos_ids=(2, 3)).stop_ids == {8}
    assert Request("r", [1], SamplingParams(stop_token_ids=(8,)), eos_ids=(2,)).stop_ids == {2, 8}


def test_the_request_keeps_its_own_copy_of_the_prompt():
    prompt = [1, 2, 3]
    mine = request("r", prompt)
    prompt.append(4)
    assert mine.tokens == [1, 2, 3]


def test_output_tokens_are_a_copy_and_empty_without_token_ids():
    one = scheduler()
    with_ids, without = request("a", [1, 2], 2), request("b", 2, 2)
    submit(one, with_ids, without)
    step(one, token=9)
    with_ids.output_tokens.append(7)
    assert with_ids.output_tokens == [9] and without.output_tokens == []
    assert (with_ids.num_output, without.num_output) == (1, 1)


def test_states_and_finish_reasons_have_the_fields_words():
    assert [status.value for status in RequestStatus] == [
        "waiting", "running", "swapped", "finished"]
    assert FINISH_REASONS == ("stop", "length", "abort", "error")


# --------------------------------------------------------------------------- intake

def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="request r: the prompt is empty; give at least 1 token"):
        check_request(request("r", []), config())
    with pytest.raises(RequestError, match="the prompt is empty"):
        check_request(request("r", 0), config())


def test_a_prompt_equal_to_max_model_len_is_refused_with_the_numbers():
    with pytest.raises(RequestError, match="the prompt has 8 tokens and needs room for 1 more, but "
                                           "max_model_len is 8: shorten it to 7 or raise"):
        check_request(request("r", [1] * 8), config(2, 4))


def test_a_prompt_of_max_model_len_minus_1_gives_exactly_1_token():
    one = scheduler(2, 4)
    longest = request("r", [1] * 7, max_tokens=5)
    submit(one, longest)
    assert rows(step(one)) == [("r", 0, 7)]
    assert (longest.output_tokens, longest.finish_reason) == ([7], "length")


@pytest.mark.parametrize(("max_tokens", "limit"), [(1, 4), (4, 7), (5, 8), (99, 8), (None, 8)])
def test_the_limit_is_prompt_plus_max_tokens_and_at_most_max_model_len(max_tokens, limit):
    one = request("r", [1, 2, 3], max_tokens)
    check_request(one, config(2, 4))
    assert one.limit == limit


def test_a_request_refused_at_submit_has_touched_nothing_and_is_told_to_the_log():
    told = []
    one = scheduler(2, 4, emit=lambda kind, **fields: told.append((kind, fields)))
    bad = request("bad", [1] * 9)
    with pytest.raises(RequestError):
        one.submit(bad)
    assert bad.limit == 0 and not one.live
    assert one.has_unfinished()  # the log still wants to hear of it
    step(one)
    assert not one.has_unfinished()
    assert told[1] == ("reject", {
        "request": "bad",
        "error": "request bad: the prompt has 9 tokens and needs room for 1 more, but "
                 "max_model_len is 8: shorten it to 7 or raise max_model_len"})


@pytest.mark.parametrize("tokens", [[-1], [5, -1, 5], [1, 2 ** 63, 1], [1.0], ["1"], [None],
                                    [True]], ids=str)
def test_token_ids_that_cannot_be_hashed_are_refused_at_submit(tokens):
    with pytest.raises(RequestError, match="request r: token ids must be whole numbers of at least "
                                           "0 and below 2"):
        scheduler().submit(request("r", tokens))


def test_the_largest_token_id_that_fits_8_bytes_is_served():
    one = scheduler(8, 1)
    submit(one, request("r", [2 ** 63 - 1, 0], 1))
    assert rows(step(one)) == [("r", 0, 2)]


def test_keys_that_cannot_be_hashed_or_repeat_are_refused_at_submit():
    with pytest.raises(RequestError, match="request r: block keys: unhashable type: 'list'"):
        scheduler().submit(request("r", 8, keys=[[1], [2]]))
    with pytest.raises(RequestError, match="request r: 3 block keys, but only 2 different ones"):
        scheduler().submit(request("r", 12, keys=[1, 2, 1]))


def test_the_same_request_object_twice_is_refused_and_the_first_goes_on():
    one = scheduler()
    mine = request("r", [1, 2], 2)
    submit(one, mine)
    with pytest.raises(RequestError, match="request r was submitted before: make a new Request"):
        one.submit(mine)
    step(one)
    step(one)
    assert mine.finish_reason == "length"
    with pytest.raises(RequestError, match="submitted before"):
        one.submit(mine)


def test_an_id_in_use_is_refused_at_arrival_and_comes_back_as_ended():
    one = scheduler()
    first, second = request("r", [1], 3), request("r", [2], 3)
    submit(one, first, second)
    batch = one.schedule()
    assert batch.requests == [first]
    assert one.commit(batch, results(batch)) == [second]
    assert (second.finish_reason, second.error) == (
        "error", "request id 'r' is already taken by a request that still runs")
    assert not first.finished


def test_a_refusal_at_arrival_is_told_to_the_log():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("r", [1], 3), request("r", [2], 3))
    step(one)
    assert events(recorder, "arrive", "reject")[1:] == [
        {"e": "reject", "request": "r",
         "error": "request id 'r' is already taken by a request that still runs"}]


def test_news_are_newcomers_aborts_and_samples_that_wait_for_their_prompt():
    one = scheduler()
    assert not one.has_news() and not one.has_unfinished()
    parent = request("p", [1, 2], 2)
    submit(one, parent)
    assert one.has_news() and one.has_unfinished()
    batch = one.schedule()
    assert not one.has_news()
    submit(one, request("c", [1, 2], 2, parent=parent))
    one.commit(batch, [5])
    one.abort("nobody")
    assert one.has_news()
    step(one)
    assert not one.has_news() and one.has_unfinished()


def test_an_id_is_free_again_when_its_request_has_ended():
    one = scheduler()
    submit(one, request("r", [1], 1))
    step(one)
    again = request("r", [2], 1)
    submit(one, again)
    step(one)
    assert again.finish_reason == "length"


# --------------------------------------------------------------------------- arrive event

def test_the_arrive_event_holds_what_a_replay_needs_and_nothing_that_is_a_default():
    plain = request("r", [4, 5], 16, arrival_time=1.5)
    plain.limit = 18
    assert arrival_fields(plain) == {"request": "r", "prompt": 2, "limit": 18, "at": 1.5,
                                     "params": {}, "stop_ids": [], "tokens": [4, 5]}


def test_the_arrive_event_of_a_rich_request_holds_all_its_fields():
    parent = request("p", 8)
    rich = Request("r", 8, SamplingParams(max_tokens=3, temperature=0.5, stop="x"), eos_ids=(9, 2),
                   priority=-1, arrival_time=2.0, deadline=0.0, cache_salt="s",
                   keys=[1, "k", b"b"], parent=parent)
    assert arrival_fields(rich) == {
        "request": "r", "prompt": 8, "limit": 0, "at": 2.0,
        "params": {"max_tokens": 3, "temperature": 0.5, "stop": ("x",)}, "stop_ids": [2, 9],
        "keys": [1, "k", "b'b'"], "priority": -1, "deadline": 0.0, "salt": "s", "parent": "p"}


# --------------------------------------------------------------------------- content keys

def keys(tokens, blocks=9, size=2, salt=""):
    return extend_keys(request("r", tokens, cache_salt=salt), blocks, size)


def test_keys_name_full_blocks_only():
    assert [len(keys([1] * length)) for length in range(6)] == [0, 0, 1, 1, 2, 2]
    assert len(keys([1] * 8, blocks=3)) == 3
    assert all(len(key) == 16 for key in keys([1, 2, 3, 4]))


def test_equal_prefixes_have_equal_keys_and_a_difference_changes_all_after_it():
    one, two = keys([1, 2, 3, 4, 5, 6]), keys([1, 2, 9, 4, 5, 6])
    assert one[0] == two[0] and one[1] != two[1] and one[2] != two[2]
    assert keys([1, 1, 1, 1])[0] != keys([1, 1, 1, 1])[1]  # the same tokens one block later


def test_no_two_ways_to_cut_tokens_give_the_same_key():
    seen = {key for tokens in ([1, 0], [0, 1], [256, 0], [0, 256], [1, 2 ** 32], [2 ** 32, 1])
            for key in keys(tokens)}
    assert len(seen) == 6


def test_a_salt_changes_every_key_and_no_two_salts_share_any():
    plain, salted, other = (keys([1, 2, 3, 4], salt=salt) for salt in ("", "a", "b"))
    assert len({*plain, *salted, *other}) == 6


def test_a_salt_that_is_no_valid_text_is_served_like_any_other():
    one = scheduler(8, 1)
    submit(one, request("r", [1, 2], 1, cache_salt="\ud800"))
    assert rows(step(one)) == [("r", 0, 2)]


def test_keys_are_computed_once_and_extended_when_tokens_come():
    one = request("r", [1, 2, 3])
    first = list(extend_keys(one, 5, 2))
    one.tokens.append(4)
    longer = extend_keys(one, 5, 2)
    assert longer is one.keys and longer[:1] == first and len(longer) == 2
    assert longer == keys([1, 2, 3, 4])


def test_given_keys_serve_full_prompt_blocks_and_output_blocks_get_keys_of_their_own():
    one = request("r", 5, keys=["a", "b", "c"])  # 2 full blocks of 2: "c" is a partial one's
    one.seq, one.num_tokens = 4, 9
    assert num_given_keys(one, 2) == 2
    first = list(extend_keys(one, 1, 2))
    assert first == ["a"]
    assert extend_keys(one, 9, 2)[:2] == ["a", "b"]
    own = one.keys[2:]
    assert len(own) == 2 and len({*own}) == 2 and all(key < 0 for key in own)
    other = request("r", 5, keys=["a", "b"])
    other.seq, other.num_tokens = 5, 9
    assert not set(extend_keys(other, 9, 2)[2:]) & set(own)


def test_the_first_requests_of_a_run_have_negative_keys_of_their_own_too():
    seen = []
    for seq in range(3):
        one = request("r", 6)
        one.seq = seq
        seen += extend_keys(one, 3, 2)
    assert len(set(seen)) == 9 and max(seen) < 0


def test_keys_of_its_own_do_not_depend_on_how_often_they_were_extended():
    bit_by_bit, at_once = request("r", 2, keys=[]), request("r", 2, keys=[])
    for one in (bit_by_bit, at_once):
        one.seq, one.num_tokens = 3, 12
    for blocks in range(1, 6):
        extend_keys(bit_by_bit, blocks, 2)
    assert bit_by_bit.keys == extend_keys(at_once, 5, 2)


# --------------------------------------------------------------------------- configuration

def test_the_defaults_are_vllms_where_vllm_has_the_thing():
    assert SchedulerConfig(num_blocks=128) == SchedulerConfig(
        num_blocks=128, block_size=16, max_model_len=2048, max_num_batched_tokens=2048,
        max_num_seqs=128, num_cpu_blocks=0, long_prefill_token_threshold=0, watermark=0.0,
        enable_prefix_caching=True, full_sequence_must_fit=True, batching="mixed", order="fcfs",
        preemption="recompute", eviction="lru")
    assert SamplingParams() == SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, logit_bias=(), logprobs=None, seed=None, n=1,
        max_tokens=16, min_tokens=0, stop=(), include_stop_str_in_output=False, stop_token_ids=(),
        ignore_eos=False)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_model_len",
                                  "max_num_batched_tokens", "max_num_seqs"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"], ids=str)
def test_counts_must_be_whole_numbers_of_at_least_1(name, value):
    fields = {"num_blocks": 4, "block_size": 4, "max_model_len": 4, name: value}
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be a whole number of at least 1"):
        SchedulerConfig(**fields)


@pytest.mark.parametrize("name", ["num_cpu_blocks", "long_prefill_token_threshold"])
@pytest.mark.parametrize("value", [-1, 0.5, False], ids=str)
def test_optional_counts_must_be_whole_numbers_of_at_least_0(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be a whole number of at least 0"):
        config(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_the_watermark_lies_in_0_to_1_without_1(value):
    with pytest.raises(ConfigError, match=r"must lie in \[0, 1\)"):
        config(watermark=value)
    assert config(watermark=0.0).watermark == 0.0 and config(watermark=0.99)


@pytest.mark.parametrize("value", ["0.1", None, True])
def test_a_watermark_that_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"watermark=.* must lie in \[0, 1\)"):
        config(watermark=value)


@pytest.mark.parametrize("name", ["enable_prefix_caching", "full_sequence_must_fit"])
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be True or False"):
        config(**{name: value})


def test_a_model_length_of_1_has_no_room_for_an_output_token():
    with pytest.raises(ConfigError, match="max_model_len=1 leaves no room for a prompt token and "
                                          "an output token: give at least 2"):
        config(max_model_len=1)
    assert config(max_model_len=2).max_model_len == 2


def test_a_pool_too_large_for_its_books_is_refused_by_name():
    with pytest.raises(ConfigError, match="num_blocks=50000001 is more than the 50000000 blocks a "
                                          "scheduler can keep books on"):
        SchedulerConfig(num_blocks=50_000_001)
    assert SchedulerConfig(num_blocks=50_000_000).num_blocks == 50_000_000


def test_every_count_of_1_is_a_working_configuration():
    one = scheduler(2, 1, max_num_batched_tokens=1, max_num_seqs=1)
    submit(one, request("r", [1], 1))
    assert rows(step(one)) == [("r", 0, 1)]


def test_a_pool_that_cannot_hold_max_model_len_says_both_ways_out():
    with pytest.raises(ConfigError, match="max_model_len=9 needs 3 blocks of 4 tokens, the pool "
                                          "has 2: lower max_model_len to 8 or give the pool 3"):
        config(2, 4, max_model_len=9)
    assert config(2, 4, max_model_len=8).max_model_len == 8


@pytest.mark.parametrize(("kind", "known"), [
    ("batching", "mixed, prefill_first, static, reserve"),
    ("order", "fcfs, priority, sjf, longest_prefix"),
    ("preemption", "recompute, swap"), ("eviction", "lru, fifo, clock")])
def test_an_unknown_policy_lists_the_known_ones(kind, known):
    with pytest.raises(ConfigError,
                       match=f"^{kind} policy 'magic' does not exist; known: {known}$"):
        scheduler(**{kind: "magic"})


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
def test_lists_that_are_numbers_are_refused_by_name(name):
    with pytest.raises(RequestError, match=f"{name}=5 must be a list"):
        SamplingParams(**{name: 5})
