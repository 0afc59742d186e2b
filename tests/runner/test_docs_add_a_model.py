"""docs/add_a_model.md: its code, run from top to bottom, gives a model equal to transformers'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine.layers.shard import Shard
from engine.models.config import read_model_config
from engine.models.registry import MODELS
from engine.runner.model_runner import load_model
from tests.runner.tiny_models import decode, make_request, make_runner

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add_a_model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's code in one namespace, run in a folder of its own: (folder, names)."""
    folder = tmp_path_factory.mktemp("page")
    before, patch = dict(MODELS), pytest.MonkeyPatch()
    patch.chdir(folder)
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    yield folder / "tiny-olmo2", names
    patch.undo()
    MODELS.clear()
    MODELS.update(before)


def test_the_page_has_a_module_under_120_lines_and_its_proof_holds(page):
    _, names = page
    assert len(BLOCKS) == 4 and BLOCKS[0].count("\n") < 120
    assert names["report"].good and "q_norm" in names["report"].worst
    assert names["report"].values > 10_000


def test_greedy_tokens_equal_transformers(page):
    directory, names = page
    reference = names["transformers"].Olmo2ForCausalLM.from_pretrained(directory).eval()
    runner, prompt = make_runner(directory), [3, 1, 4, 1, 5, 9, 2, 6]
    request = make_request("r", prompt, range(8))
    decode(runner, [request], 16)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert request.tokens == expected[0].tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_norms_together_are_the_checkpoints(page, size):
    directory, _ = page
    config = read_model_config(directory)
    whole = load_model(config, directory, torch.float32).model.layers[0].self_attn
    parts = [load_model(config, directory, torch.float32, shard=Shard(rank, size))
             .model.layers[0].self_attn for rank in range(size)]
    assert torch.equal(torch.cat([part.q_norm.weight for part in parts]), whole.q_norm.weight)
    copies = max(size // 2, 1)  # two K/V heads: with four ranks each has two holders
    assert torch.equal(torch.cat([part.k_norm.weight for part in parts[::copies]]),
                       whole.k_norm.weight)


def test_a_page_without_the_norm_would_be_caught(page):
    directory, names = page
    attention = names["Olmo2Attention"]
    plain = attention.normalize
    attention.normalize = lambda self, qk: qk
    try:
        report = names["verify"](str(directory), num_prompts=2, num_outputs=2)
    finally:
        attention.normalize = plain
    assert report.first.op == "layers.0.q_rope"


def test_the_page_cites_names_that_exist():
    import engine.models.llama as llama
    import engine.models.qwen3_moe as moe
    assert hasattr(llama.LlamaForCausalLM, "why_no_graphs")
    assert "why_no_graphs" in vars(moe.Qwen3MoeForCausalLM)
    for path in re.findall(r"`((?:engine|tests)/[\w/]+\.py)`", PAGE.read_text()):
        assert (PAGE.parents[1] / path).is_file(), path
