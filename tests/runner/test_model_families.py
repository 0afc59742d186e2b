"""Every family against transformers, and against itself under other batches and block tables."""

from __future__ import annotations

import random

import pytest
import torch

from tests.runner.tiny_models import (
    FAMILIES,
    decode,
    logits_of,
    make_batch,
    make_request,
    make_runner,
)

LENGTHS = (1, 3, 4, 5, 9, 17)  # around the block size of 4


def prompts_of(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(length)] for length in LENGTHS]


def scattered_tables(seed: int, num_blocks: int = 64, pages: int = 8) -> list[list[int]]:
    blocks = list(range(num_blocks))
    random.Random(seed).shuffle(blocks)
    return [blocks[index * pages:(index + 1) * pages] for index in range(len(LENGTHS))]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_mixed_batch_equal_transformers(family, checkpoint):
    directory, reference = checkpoint(family)
    runner = make_runner(directory)
    requests = [make_request(str(n), prompt, table) for n, (prompt, table)
                in enumerate(zip(prompts_of(), scattered_tables(1), strict=True))]
    logits = logits_of(runner, make_batch([(r, 0, len(r.tokens)) for r in requests]))
    for row, request in zip(logits, requests, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([request.tokens])).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_mixed_batch_equal_transformers(family, checkpoint):
    directory, reference = checkpoint(family)
    runner = make_runner(directory)
    requests = [make_request(str(n), prompt, table) for n, (prompt, table)
                in enumerate(zip(prompts_of(), scattered_tables(2), strict=True))]
    decode(runner, requests, 12)
    for request, prompt in zip(requests, prompts_of(), strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert request.tokens == expected[0].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunks_batches_and_permuted_tables_change_no_logit_in_float64(family, chunk, checkpoint):
    directory, _ = checkpoint(family)
    expected = []
    for prompt in prompts_of():
        runner = make_runner(directory, dtype=torch.float64)
        request = make_request("alone", prompt, range(8))
        expected.append(logits_of(runner, make_batch([(request, 0, len(prompt))]))[0])
    runner = make_runner(directory, dtype=torch.float64)
    requests = [make_request(str(n), prompt, table) for n, (prompt, table)
                in enumerate(zip(prompts_of(), scattered_tables(chunk), strict=True))]
    start = 0
    found: dict[str, torch.Tensor] = {}
    while len(found) < len(requests):
        rows = [(r, start, min(chunk, len(r.tokens) - start))
                for r in requests if start < len(r.tokens)]
        batch = make_batch(rows)
        ends = [r.id for index, (r, _, _) in enumerate(rows) if index not in batch.partial]
        found.update(zip(ends, logits_of(runner, batch), strict=True))
        start += chunk
    for request, row in zip(requests, expected, strict=True):
        torch.testing.assert_close(found[request.id], row, atol=1e-10, rtol=1e-10)


def test_two_rows_of_one_step_may_share_the_blocks_one_of_them_writes(checkpoint):
    directory, _ = checkpoint("llama")
    prompt = prompts_of()[-1]
    runner = make_runner(directory)
    owner = make_request("owner", prompt, range(6))
    reader = make_request("reader", prompt, [0, 1, 2, 3, 20, 21])  # 16 of 17 tokens shared
    logits = logits_of(runner, make_batch([(reader, 16, 1), (owner, 0, 17)]))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_the_padding_block_stays_zero(checkpoint):
    runner = make_runner(checkpoint("llama")[0])
    requests = [make_request(str(n), prompt, table) for n, (prompt, table)
                in enumerate(zip(prompts_of(), scattered_tables(3), strict=True))]
    decode(runner, requests, 6, chunk=3)
    assert not runner.cache.device_blocks[:, :, -1].any()


def test_a_row_with_nan_logits_fails_alone(checkpoint):
    directory, _ = checkpoint("llama")
    runner = make_runner(directory)
    good, bad = make_request("good", [1, 2, 3], [0, 1]), make_request("bad", [4, 5, 6], [2, 3])
    decode(runner, [good, bad], 1)
    runner.cache.device_blocks[0, 0, 2] = float("nan")  # a K that bad's next token reads
    tokens = runner.execute(make_batch([(bad, 3, 1), (good, 3, 1)]))
    assert "NaN" in tokens[0].reason
    assert isinstance(tokens[1], int)


def test_bfloat16_and_float16_follow_float32_closely(checkpoint):
    directory, _ = checkpoint("qwen3")
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        runner = make_runner(directory, dtype=dtype)
        request = make_request("r", prompts_of()[-1], range(8))
        rows.append(logits_of(runner, make_batch([(request, 0, 17)]))[0].float())
    assert (rows[1] - rows[0]).abs().max() < 0.1 * rows[0].abs().max()
    assert (rows[2] - rows[0]).abs().max() < 0.02 * rows[0].abs().max()
