"""The sampler against exact probabilities, and against whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.core.batch import RowFailed
from engine.core.request import Request, SamplingParams
from engine.runner.counter_rng import derive_seed, uniforms
from engine.runner.logits import SampleRow, adjust_logits
from engine.runner.sampler import best_tokens, draw_by_chunks, sample

VOCAB = 600  # more than two chunks of 256
DRAWS = 4000


def row(position=3, prompt=(1, 2, 3), output=(), eos=(), **params) -> SampleRow:
    request = Request("r", list(prompt), SamplingParams(max_tokens=9999, **params), eos_ids=eos)
    request.seq = 0
    request.tokens.extend(output)
    return SampleRow(request, position)


def peaked_logits(vocab=VOCAB, seed=1) -> torch.Tensor:
    """A few likely tokens scattered over the vocabulary, many unlikely ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator) * 3


def draw(logits, draws=DRAWS, **params) -> np.ndarray:
    """How often each token comes, over `draws` positions of one request."""
    request = row(**params).request
    counts = np.zeros(len(logits), dtype=int)
    for start in range(0, draws, 500):
        rows = [SampleRow(request, position) for position in range(start + 3, start + 503)]
        tokens = sample(logits.repeat(len(rows), 1), rows, 0).tokens
        counts += np.bincount(tokens, minlength=len(logits))
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square of counts against exact probabilities, rare tokens pooled."""
    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities / probabilities.sum() * counts.sum()
    order = np.argsort(-expected)
    pooled_expected, pooled_counts, e, c = [], [], 0.0, 0
    for token in order:
        e, c = e + expected[token], c + counts[token]
        if e >= 8:
            pooled_expected.append(e)
            pooled_counts.append(c)
            e, c = 0.0, 0
    pooled_expected[-1] += e
    pooled_counts[-1] += c
    if len(pooled_expected) == 1:
        return 1.0
    return stats.chisquare(pooled_counts, pooled_expected).pvalue


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Straightforward probabilities in float64: min-p, top-k, top-p, in vLLM's order."""
    probabilities = torch.softmax(logits.double() / temperature, -1).numpy()
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("params", [
    {}, {"temperature": 0.4}, {"temperature": 2.5}, {"top_k": 7}, {"top_k": 1}, {"top_p": 0.8},
    {"top_p": 0.05}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.02, "top_p": 0.7},
    {"temperature": 1.7, "top_k": 300, "top_p": 0.95, "min_p": 0.001}],
    ids=lambda params: " ".join(f"{k}={v}" for k, v in params.items()) or "plain")
def test_frequencies_follow_the_exact_probabilities(params):
    logits = peaked_logits()
    assert p_value(draw(logits, seed=11, **params), exact(logits, **params)) > 1e-4


def test_top_p_keeps_the_token_that_crosses_it():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    counts = draw(logits, draws=500, top_p=0.6)
    assert (counts > 0).tolist() == [False, False, True, True]


def test_top_p_of_a_flat_distribution_reaches_past_the_first_try():
    logits = torch.zeros(5000)
    logits[:10] = 1e-3
    tokens = sample(logits.repeat(800, 1), [row(position, top_p=0.9) for position in range(3, 803)],
                    0).tokens
    assert len(set(tokens)) > 600
    assert sum(token < 10 for token in tokens) < 30


def test_greedy_rows_take_the_best_token_whatever_the_other_parameters():
    logits = torch.stack([peaked_logits(seed=seed) for seed in range(4)])
    rows = [row(temperature=0.0), row(temperature=0.0, top_k=3), row(temperature=1e-9, top_p=0.5),
            row(temperature=1e-300)]
    assert sample(logits.clone(), rows, 0).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [7, 31, 32, 96, 256, 1024, 1000, 32 * 37])
def test_the_best_token_is_the_first_of_the_largest_logits(vocab):
    """Ties inside a chunk and between chunks, rows of -inf, NaN and +inf: as PyTorch's maximum."""
    logits = torch.randint(-3, 3, (200, vocab)).float()
    logits[0] = -math.inf
    logits[1, vocab // 2] = logits[2, -1] = math.nan
    logits[3, vocab // 3] = math.inf
    best, tokens = best_tokens(logits)
    wanted, first = logits.max(dim=-1)
    assert torch.equal(best.nan_to_num(9e9), wanted.nan_to_num(9e9))
    assert torch.equal(tokens, first)
    assert all(row.tolist().index(value) == token for row, value, token in
               zip(logits[3:], best[3:].tolist(), tokens[3:].tolist(), strict=True))


def test_a_small_temperature_is_no_overflow():
    logits = torch.tensor([1e4, -1e4, 0.0]).repeat(50, 1)
    assert set(sample(logits, [row(p, temperature=2e-5) for p in range(3, 53)], 0).tokens) == {0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([
    {}, {"temperature": 0.0}, {"top_k": 5}, {"top_k": 64}, {"top_p": 0.3}, {"top_p": 0.99},
    {"min_p": 0.2}, {"presence_penalty": 1.0}, {"logit_bias": ((5, 3.0),)}]),
    min_size=2, max_size=9))
@example([{}] * 8 + [{"presence_penalty": 1.0}])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(all_params):
    logits = torch.stack([peaked_logits(1500, seed) for seed in range(len(all_params))])
    # Positions up to 13: every token before them is known, as the engine has it.
    rows = [row(5 + index, output=(7, 7, 9) * 4, seed=index, **params)
            for index, params in enumerate(all_params)]
    together = sample(logits.clone(), rows, 0).tokens
    alone = [sample(logits[index:index + 1].clone(), [rows[index]], 0).tokens[0]
             for index in range(len(rows))]
    assert together == alone


def test_seeds_and_positions_change_the_token_and_nothing_else_does():
    logits = torch.zeros(1, VOCAB)

    def token(position, engine_seed=0, **params):
        return sample(logits.clone(), [row(position, **params)], engine_seed).tokens[0]

    assert token(3, seed=5) == token(3, engine_seed=9, seed=5)
    assert len({token(position, seed=5) for position in range(3, 23)}) > 15
    assert len({token(3, seed=seed) for seed in range(20)}) > 15
    assert token(3) != token(3, engine_seed=1)


def test_a_broken_row_fails_alone_with_its_reason():
    logits = torch.stack([peaked_logits()] * 5)
    logits[0, 17] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    rows = [row(), row(), row(temperature=0.0), row(), row(temperature=0.0)]
    tokens = sample(logits, rows, 0).tokens
    assert [type(token) for token in tokens] == [RowFailed, int, RowFailed, RowFailed, int]
    assert "NaN" in tokens[0].reason
    assert "infinite" in tokens[2].reason
    assert "no token is left" in tokens[3].reason


def test_tokens_masked_with_minus_infinity_are_never_drawn():
    logits = torch.full((VOCAB,), float("-inf"))
    logits[[3, 255, 256, 599]] = torch.tensor([0.0, 1.0, 2.0, 0.5])
    counts = draw(logits, draws=2000)
    assert np.flatnonzero(counts).tolist() == [3, 255, 256, 599]
    assert p_value(counts, exact(logits)) > 1e-4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=1, max_size=40),
       st.floats(0, 1, exclude_max=True), st.integers(0, 2))
def test_no_fraction_picks_a_weight_of_zero(weights, fraction, chunk):
    if not any(weights):
        weights[0] = 1.0
    padded = torch.zeros(1, 768)
    padded[0, chunk * 256:chunk * 256 + len(weights)] = torch.tensor(weights)
    for pick in (fraction, 0.0, 1 - 2**-53):
        index = draw_by_chunks(padded, torch.tensor([pick], dtype=torch.float64))
        assert padded[0, index] > 0


# ------------------------------------------------------------------------------------ penalties

def adjusted(logits, one: SampleRow) -> list[float]:
    out = logits[None].clone()
    adjust_logits(out, [one])
    return out[0].tolist()


def test_each_parameter_changes_exactly_its_logits():
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 3.0])
    known = {"prompt": (0, 1), "output": (2, 2, 3), "position": 5}
    assert adjusted(logits, row(repetition_penalty=2.0, **known)) == [1.0, -4.0, 0.5, -2.0, 3.0]
    assert adjusted(logits, row(frequency_penalty=0.5, **known)) == [2.0, -2.0, 0.0, -1.5, 3.0]
    assert adjusted(logits, row(presence_penalty=0.5, **known)) == [2.0, -2.0, 0.5, -1.5, 3.0]
    biased = adjusted(logits, row(logit_bias={4: -1.5, 0: 1.0}, **known))
    assert biased == [3.0, -2.0, 1.0, -1.0, 1.5]
    assert adjusted(logits, row(repetition_penalty=2.0, logit_bias={0: 2.0}, **known))[0] == 2.0


def test_only_tokens_before_the_position_count():
    logits = torch.tensor([1.0, 1.0, 1.0])
    one = row(prompt=(0,), output=(1, 2), position=2, presence_penalty=1.0)
    assert adjusted(logits, one) == [1.0, 0.0, 1.0]


def test_stop_ids_are_masked_until_min_tokens_are_out():
    logits = torch.zeros(4)
    short = row(3, eos=(2,), min_tokens=2, stop_token_ids=(1,))
    assert adjusted(logits, short) == [0.0, float("-inf"), float("-inf"), 0.0]
    long = row(5, output=(0, 0), eos=(2,), min_tokens=2, stop_token_ids=(1,))
    assert adjusted(logits, long) == [0.0] * 4


def test_a_mixed_batch_equals_its_rows_one_by_one():
    logits = torch.stack([peaked_logits(50, seed) for seed in range(4)])
    rows = [row(), row(6, output=(4, 4, 9), repetition_penalty=1.3, frequency_penalty=0.2),
            row(logit_bias={3: 5.0}), row(eos=(7,), min_tokens=3, presence_penalty=-1.0)]
    together = logits.clone()
    adjust_logits(together, rows)
    for index, one in enumerate(rows):
        assert adjusted(logits[index], one) == together[index].tolist()


# ------------------------------------------------------------------------------------ logprobs

def test_logprobs_are_those_of_the_model_before_any_parameter():
    logits = peaked_logits(40)
    one = row(logprobs=3, temperature=0.0, logit_bias={2: 100.0})
    samples = sample(logits[None].clone(), [one], 0)
    entry, expected = samples.logprobs[0], torch.log_softmax(logits, -1)
    assert samples.tokens == [2] and entry.token_id == 2
    assert entry.logprob == pytest.approx(float(expected[2]))
    assert entry.rank == 1 + int((expected > expected[2]).sum())
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()


def test_rows_that_ask_for_no_logprobs_get_none():
    samples = sample(torch.zeros(2, 9), [row(), row(logprobs=0)], 0)
    assert samples.logprobs[0] is None
    assert samples.logprobs[1].top == ()


# ------------------------------------------------------------------------------ random numbers

def test_uniforms_are_uniform_over_positions_and_over_seeds():
    over_positions = uniforms([123] * 20000, np.arange(20000))
    over_seeds = uniforms(range(20000), [7] * 20000)
    for values in (over_positions, over_seeds):
        assert values.min() >= 0.0 and values.max() < 1.0
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_uniforms_of_seed_0_are_the_published_splitmix64_sequence():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniforms([0] * 3, [0, 1, 2]).tolist() == [(word >> 11) * 2.0**-53 for word in published]


def test_seeds_count_modulo_2_to_the_64():
    assert len(set(uniforms([5, 2**64 + 5, 5 - 2**64], [3] * 3).tolist())) == 1
    assert len(set(uniforms([-1, 0, 1], [3] * 3).tolist())) == 3


def test_derived_seeds_differ():
    assert len({derive_seed(seed, number) for seed in range(50) for number in range(50)}) == 2500
