"""The roofline: FLOPs, bytes and seconds by hand, and what must hold for every step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.batch import Batch
from simulator.cost import PARTS, Roofline
from simulator.hardware import load_hardware
from simulator.modelspec import load_model
from simulator.shape import Shape, shape_of

LLAMA, H100 = load_model("llama-3.1-8b"), load_hardware("h100")


def decode(rows: int, context: int) -> Shape:
    """`rows` decodes that read `context` tokens in all."""
    return Shape(rows, rows, rows, context, 0, 0, 0, 0.0)


def chunk(tokens: int, cached: int, sampled: int = 1) -> Shape:
    """One prefill chunk behind `cached` tokens."""
    return Shape(tokens, sampled, 0, 0, 1, tokens, cached + tokens,
                 tokens * cached + tokens * (tokens + 1) / 2)


def tuned(**values: float):
    return replace(H100, efficiency=replace(H100.efficiency, **values))


IDEAL = tuned(gemm_flops=1.0, gemm_bandwidth=1.0, prefill_flops=1.0, decode_bandwidth=1.0,
              prefill_bandwidth=1.0, elementwise=1e12, p_norm=math.inf, layer_us=0.0, step_us=0.0,
              decode_seq_us=0.0, sampled_seq_us=0.0)


def test_a_batch_becomes_the_sums_by_hand():
    batch = Batch(0, [None] * 3, [100, 0, 64], [1, 50, 16], {2})
    assert shape_of(batch) == Shape(tokens=67, sampled=2, decodes=1, context=101, chunks=2,
                                    chunk_tokens=66, chunk_context=50 + 80,
                                    chunk_pairs=50 * 51 / 2 + 16 * 64 + 16 * 17 / 2)


def test_flops_of_a_prefill_are_2_a_weight_and_token_plus_attention():
    cost = Roofline(LLAMA, H100).price(chunk(1000, 0))
    linear = 2 * 1000 * 32 * LLAMA.layer_params
    attention = 4 * 32 * 128 * 32 * (1000 * 1001 / 2)
    head = 2 * 128_256 * 4096  # one sampled row
    assert cost.flops == pytest.approx(linear + attention + head, rel=1e-12)


def test_bytes_of_one_decode_are_the_weights_its_context_and_little_else():
    cost = Roofline(LLAMA, H100).price(decode(1, 5000))
    weights = 2 * (32 * LLAMA.layer_params + 128_256 * 4096)
    assert cost.bytes == pytest.approx(weights + 131_072 * 5001, rel=2e-3)


def test_the_ideal_device_is_the_textbook_roofline():
    price = Roofline(LLAMA, IDEAL).price
    step = price(decode(1, 1000))
    assert step.bound == "weights"
    assert step.seconds == pytest.approx(step.bytes / 3350e9, rel=2e-3)
    step = price(chunk(8192, 0))
    assert step.bound == "compute"
    assert step.seconds == pytest.approx(step.flops / 989e12, rel=0.02)


def test_p_norm_lies_between_the_maximum_and_the_sum():
    shape = decode(256, 256 * 500)
    seconds = [Roofline(LLAMA, tuned(p_norm=p)).price(shape).seconds for p in (math.inf, 2.0, 1.0)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("shape", [decode(1, 1), decode(300, 10**6), chunk(2048, 30000),
                                   Shape(600, 80, 80, 90_000, 1, 520, 520, 520 * 521 / 2, 3, 5)])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("graphs", [True, False])
def test_the_five_parts_add_up_to_the_seconds(shape, tp, graphs):
    cost = Roofline(LLAMA, H100, tp=tp, graphs=graphs).price(shape)
    assert sum(getattr(cost, part) for part in PARTS) == pytest.approx(cost.seconds, rel=1e-12)
    assert cost.overhead > 32 * 12e-6
    assert all(getattr(cost, part) >= 0 for part in PARTS)


def test_the_lm_head_is_paid_for_sampled_rows_only():
    model = Roofline(LLAMA, H100)
    none, one = model.price(chunk(2048, 0, sampled=0)), model.price(chunk(2048, 0, sampled=1))
    assert one.flops - none.flops == pytest.approx(2 * 128_256 * 4096, rel=1e-9)
    assert one.bytes - none.bytes == pytest.approx(2 * 128_256 * 4096, rel=1e-3)


def test_grouped_queries_read_each_kv_head_once():
    gqa, mha = LLAMA, replace(LLAMA, kv_heads=32)
    read = [Roofline(model, IDEAL).price(decode(8, 80_000)).kv for model in (gqa, mha)]
    assert read[1] == pytest.approx(4 * read[0])


@pytest.mark.parametrize("graphs", [True, False])
def test_the_end_times_of_k_steps_are_those_of_k_single_steps_to_the_last_bit(graphs):
    model = Roofline(LLAMA, H100, graphs=graphs)
    batch = Batch(0, [None] * 3, [100, 200, 300], [1, 1, 1])
    now = 17.3
    for end in model.end_times(batch, now, 40, math.inf):
        now += model.cost(batch).seconds
        assert now == end and model.cost(batch).seconds == model.seconds(batch)
        batch.starts = [start + 1 for start in batch.starts]
    assert batch.starts[0] == (140 if graphs else 101)  # eager ones go one by one


@given(starts=st.lists(st.integers(0, 60_000), min_size=1, max_size=40),
       chunks=st.lists(st.sampled_from([7, 300]), max_size=2),
       launch_us=st.sampled_from([0.0, 6.0, 40.0]), graphs=st.booleans())
@example([60_000], [], 40.0, False)
@example([60_000] * 40, [], 6.0, False)
def test_the_quick_price_is_the_explained_one_on_both_sides_of_the_launch_bound(
        starts, chunks, launch_us, graphs):
    """A log writes the second, a run without a log asks for the first: they may not differ."""
    model = Roofline(LLAMA, tuned(launch_us=launch_us), graphs=graphs)
    counts = [*chunks, *[1] * len(starts)][:len(starts)]
    batch = Batch(0, [None] * len(starts), starts, counts)
    assert model.seconds(batch) == model.cost(batch).seconds
    assert model.end_times(batch, 0.0, 1, math.inf) == [model.cost(batch).seconds]


def test_end_times_stop_at_the_first_that_is_not_before_the_horizon():
    model = Roofline(LLAMA, H100)
    batch = Batch(0, [None] * 3, [100, 200, 300], [1, 1, 1])
    free = model.end_times(batch, 0.0, 100, math.inf)
    for horizon in (0.0, 1e-9, free[0], free[6], free[6] + 1e-12, free[98], 1e9):
        ends = model.end_times(batch, 0.0, 100, horizon)
        assert ends == free[:len(ends)] and all(end < horizon for end in ends[:-1])
        assert ends[-1] >= horizon or len(ends) == 100


def test_a_decode_step_is_padded_to_the_next_captured_size():
    model, eager = Roofline(LLAMA, H100), Roofline(LLAMA, tuned(launch_us=0.0), graphs=False)
    assert model.price(decode(17, 100)).flops == model.price(decode(24, 100)).flops \
        - 2 * (24 - 17) * 128_256 * 4096  # the head is not padded
    assert eager.price(decode(17, 100)).flops < model.price(decode(17, 100)).flops


def test_eager_launches_bound_small_steps_and_not_large_ones():
    model = Roofline(LLAMA, tuned(kernels_per_layer=12, launch_us=20.0), graphs=False)
    assert model.price(decode(1, 1)).seconds >= 32 * 12 * 20e-6
    large = chunk(8192, 0)
    assert model.price(large).seconds == pytest.approx(Roofline(LLAMA, H100).price(large).seconds)


def test_two_all_reduces_a_layer_by_hand():
    cost = Roofline(LLAMA, H100, tp=4).price(chunk(1000, 0))
    ring = 2 * 3 / 4 * 1000 * 4096 * 2 / 450e9
    assert cost.comm == pytest.approx(64 * (ring + 10e-6))
    assert Roofline(LLAMA, H100).price(chunk(1000, 0)).comm == 0.0


def test_swapped_blocks_travel_at_the_pcie_rate():
    model = Roofline(LLAMA, H100, block_size=16)
    still = decode(4, 4000)
    moved = still._replace(swapped=10)
    extra = model.price(moved).seconds - model.price(still).seconds
    assert extra == pytest.approx(10 * 16 * 131_072 / (0.8 * 64e9))


def test_an_empty_step_costs_its_host_time_only():
    cost = Roofline(LLAMA, H100).price(Shape(0, 0, 0, 0, 0, 0, 0, 0.0))
    assert (cost.seconds, cost.bytes) == (1e-3, 0.0)


def test_the_shape_of_one_chunk_among_decodes_is_that_of_the_general_sum():
    from random import Random

    from simulator.shape import shape_from
    rng = Random(0)
    for chunks in (0, 1, 2, 5):
        for _ in range(20):
            counts = [1] * rng.randint(0, 6) + [rng.randint(2, 99) for _ in range(chunks)]
            rng.shuffle(counts)
            starts = [rng.randint(0, 500) for _ in counts]
            rows = list(zip(starts, counts))
            ones = [start for start, count in rows if count == 1]
            more = [(start, count) for start, count in rows if count > 1]
            assert shape_from(starts, counts, sum(counts), 0) == Shape(
                sum(counts), len(rows), len(ones), sum(ones) + len(ones), len(more),
                sum(q for _, q in more), sum(k + q for k, q in more),
                sum(q * k + q * (q + 1) / 2 for k, q in more))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_ranks_bytes_are_those_of_the_documents_table(ranks):
    """Weights are divided, and of a GEMM's activations the side that is: not the other."""
    m, t = LLAMA, 100
    q, kv = m.heads * m.head_dim / ranks, m.kv_heads * m.head_dim / ranks
    f, h, v = m.intermediate / ranks, m.hidden, m.vocab / ranks
    gemms = [(h, q + 2 * kv), (q, h), (h, 2 * f), (f, h)]
    layer = sum(k * n + t * (k + n) for k, n in gemms) + t * (8 * h + 3 * f + 2 * (q + kv))
    head = h * v + h + v  # of one row
    attention = 2 * m.layers * kv * (t + t)  # K and V: read by the chunk, and written
    expected = m.dtype_bytes * (m.layers * layer + head + attention)
    assert Roofline(m, H100, tp=ranks).price(chunk(t, 0)).bytes == pytest.approx(expected)
