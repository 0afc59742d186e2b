"""The pulled model against transformers. Skipped where it was not pulled."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.weights.resolve import resolve_model

pytestmark = pytest.mark.real_model

PROMPTS = [
    "Hello", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,",
    "Water boils at a temperature of", "Once upon a time, in a village by the sea, there lived",
    "Translate to French: good morning ->", "The three primary colours are red,",
    "In 1969, the first people to walk on the Moon were Neil Armstrong and",
    "A paged KV cache keeps the keys and values of a request in blocks of fixed size. " * 6,
]
MANY = 6


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=512, max_num_seqs=16)


@pytest.fixture(scope="module")
def reference():
    """Greedy continuations by transformers, one prompt at a time, without end tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=MANY, do_sample=False, pad_token_id=0)
        found.append(out[0, ids["input_ids"].shape[1]:].tolist())
    return found


PARAMS = SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True)


def test_ten_prompts_in_one_batch_give_transformers_tokens(llm, reference):
    assert [out.token_ids for out in llm.generate(PROMPTS, PARAMS)] == reference


def test_ten_prompts_one_by_one_give_transformers_tokens(llm, reference):
    llm.engine.scheduler.reset_prefix_cache()
    assert [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS] == reference


def test_the_capital_of_france_is_paris(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (out,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=16))
    assert out.text == "The capital of France is Paris."
    assert out.finish_reason == "stop"


def test_numbers_are_cut_into_digits_as_smollm_does(llm):
    assert llm.tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
