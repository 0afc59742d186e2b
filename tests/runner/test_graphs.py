"""Buckets, static buffers, padding rows: the code of CUDA graphs, replayed eagerly on a CPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention.base import StepInputs
from engine.core.errors import ConfigError
from engine.models.qwen3_moe import why_one_by_one
from engine.runner.graphs import LARGEST, Buffers, CudaRecorder, EagerRecorder, bucket_sizes
from tests.runner.test_overlap import everything, workload
from tests.runner.tiny_models import FAMILIES, make_batch, make_request, make_runner

OPTIONS = dict(max_model_len=96, num_kv_blocks=64, block_size=4, dtype="float64", max_num_seqs=8)


# ------------------------------------------------------------------------------------- buckets

@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 12, 100, 256, 300, 511, 512, 513, 4096])
def test_every_batch_up_to_the_most_requests_has_a_size_and_none_larger_is_recorded(most):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST)
    for rows in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(8, rows / 4 + 1)  # little is computed in vain


@pytest.mark.parametrize("dtype, capability, why", [
    (torch.bfloat16, None, None), (torch.bfloat16, (9, 0), None), (torch.bfloat16, (10, 3), None),
    (torch.bfloat16, (8, 0), "capability 8.0"), (torch.bfloat16, (12, 0), "capability 12.0"),
    (torch.float16, (9, 0), "float16"), (torch.float32, None, "float32")])
def test_mixtures_are_recorded_only_where_their_products_ask_nothing_of_the_host(dtype, capability,
                                                                                why):
    told = why_one_by_one(dtype, capability)
    assert told is why or why in told


def step_inputs(rows: int, pages: int = 2, tokens: int = 1) -> StepInputs:
    return StepInputs(np.arange(1, rows * tokens + 1), np.arange(rows * tokens),
                      np.arange(100, 100 + rows * tokens),
                      np.arange(0, rows * tokens + 1, tokens, dtype=np.int32),
                      np.full(rows, 5, np.int32), np.full((rows, pages), 3, np.int32),
                      np.arange(rows) * tokens)


def test_a_step_of_fewer_rows_leaves_nothing_of_the_one_before_in_its_padding_rows():
    buffers = Buffers(8, 4, 99, torch.device("cpu"))
    buffers.fill(step_inputs(8, pages=4), 8)
    buffers.fill(step_inputs(3), 4)
    assert buffers.input_ids[:4].tolist() == [1, 2, 3, 0]
    assert buffers.slots[:4].tolist() == [100, 101, 102, -1]
    assert buffers.seqlens_k[:4].tolist() == [5, 5, 5, 1]
    assert buffers.positions[3] == 0
    assert buffers.tables[:4].tolist() == [[3, 3, 99, 99]] * 3 + [[99] * 4]


def test_static_buffers_stay_where_they_are():
    buffers = Buffers(8, 4, 99, torch.device("cpu"))
    names = ("input_ids", "positions", "slots", "seqlens_k", "tables")
    before = [getattr(buffers, name).data_ptr() for name in names]
    buffers.fill(step_inputs(5), 8, lambda ids: ids.__setitem__(0, 7))
    assert [getattr(buffers, name).data_ptr() for name in names] == before
    assert buffers.input_ids[0] == 7


# ------------------------------------------------------------------------------------- steps

@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_replayed_steps_equal_those_of_eager_ones(family, checkpoint):
    directory, _ = checkpoint(family)
    eager, replayed = (make_runner(directory, dtype=torch.float64) for _ in range(2))
    replayed.record_graphs(12, EagerRecorder())
    rng = random.Random(1)
    requests = [make_request(str(n), [rng.randrange(97) for _ in range(1 + 3 * n)],
                             range(6 * n, 6 * n + 6)) for n in range(7)]
    first = make_batch([(r, 0, len(r.tokens)) for r in requests])
    for runner in (eager, replayed):
        runner.run(first)
    for rows in (7, 1, 5, 2, 6):  # sizes 8, 1, 8, 2, 8
        for request in requests[:rows]:
            request.tokens.append(rng.randrange(97))
        batch = make_batch([(r, len(r.tokens) - 1, 1) for r in requests[:rows]])
        logits = [runner.forward(runner.prepare(batch)[1]) for runner in (eager, replayed)]
        torch.testing.assert_close(logits[0], logits[1], atol=1e-12, rtol=1e-12)
    assert not replayed.cache.device_blocks[:, :, -1].any()  # padding rows write nothing


def test_only_steps_of_lone_tokens_up_to_the_largest_size_are_replayed(checkpoint):
    runner = make_runner(checkpoint("llama")[0])
    runner.record_graphs(5, EagerRecorder())
    size_for = runner.graphs.size_for
    assert [size_for(step_inputs(rows)) for rows in range(1, 7)] == [1, 2, 4, 4, 5, None]
    assert size_for(step_inputs(2, tokens=3)) is None


def test_rows_that_do_not_sample_are_left_out_of_the_logits(checkpoint):
    directory, _ = checkpoint("llama")
    runner = make_runner(directory)
    requests = [make_request(str(n), [5, 6, 7, 8], [2 * n, 2 * n + 1]) for n in range(3)]
    runner.run(make_batch([(r, 0, 2) for r in requests]))
    batch = make_batch([(requests[0], 2, 1), (requests[1], 2, 1), (requests[2], 2, 1)])
    assert batch.partial == {0, 1, 2}
    requests[1].tokens.pop()  # its next token is its last known one
    batch = make_batch([(request, 2, 1) for request in requests])
    expected = runner.forward(runner.prepare(batch)[1])
    runner.record_graphs(4, EagerRecorder())
    found = runner.forward(runner.prepare(batch)[1])
    assert found.shape == (1, 97)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_replays_brings_the_same_tokens(overlap):
    prompts, params = workload()
    expected = everything(LLM("tiny", **OPTIONS).generate(prompts, params))
    with LLM("tiny", overlap=overlap, **OPTIONS) as llm:
        llm.engine.runner.record_graphs(8, EagerRecorder())
        assert everything(llm.generate(prompts, params)) == expected


def test_a_recording_that_fails_names_the_size_and_the_way_out(checkpoint):
    class Refuses(EagerRecorder):
        def record(self, call):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    runner = make_runner(checkpoint("llama")[0])
    with pytest.raises(ConfigError, match="for 3 rows .operation not permitted when stream is "
                                          "capturing.: enforce_eager=True"):
        runner.record_graphs(3, Refuses())


@pytest.mark.nightly  # the compiler takes a minute
@pytest.mark.parametrize("overlap", [False, True])
def test_layers_compiled_together_give_the_same_tokens(overlap):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 11]
    expected = everything(LLM("tiny", **OPTIONS).generate(prompts, params))
    torch._dynamo.reset()
    with LLM("tiny", compile=True, overlap=overlap, **OPTIONS) as llm:
        assert everything(llm.generate(prompts, params)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_real_graphs_bring_the_tokens_of_eager_steps(overlap):
    prompts, params = workload()
    options = {**OPTIONS, "dtype": "float32", "device": "cuda", "overlap": overlap}
    expected = everything(LLM("tiny", enforce_eager=True, **options).generate(prompts, params))
    with LLM("tiny", **options) as llm:
        assert isinstance(llm.engine.runner.graphs.recorder, CudaRecorder)
        assert everything(llm.generate(prompts, params)) == expected
