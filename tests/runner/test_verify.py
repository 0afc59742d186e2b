"""verify: the engine equals transformers, and every planted fault is found where it was planted."""

from __future__ import annotations

import json

import pytest
import torch

from engine.core.errors import ConfigError
from engine.verify.check import make_prompts, verify
from engine.verify.faults import FAULTS
from engine.verify.probe import Probe
from engine.verify.reference import VerifyError
from tests.runner.cli import run  # noqa: F401  (a fixture)
from tests.runner.tiny_models import FAMILIES

# Faults that the tiny Qwen3 has no place for.
MODEL_OF = {"q-bias": "qwen2", "expert-shares": "qwen3-moe", "expert-order": "qwen3-moe"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_every_family_equals_transformers(family, checkpoint):
    report = verify(str(checkpoint(family)[0]))
    assert report.good and report.first is None and report.near_ties == []
    assert {"embedding", "q_rope", "k_cache", "attention", "mlp", "output", "norm",
            "logits"} <= set(report.worst)
    assert report.steps > report.outputs  # some prompt came in chunks


@pytest.mark.parametrize("dtype, block_size", [("float64", 4), ("float32", 16)])
def test_tiny_equals_transformers_in_other_dtypes_and_block_sizes(dtype, block_size):
    report = verify("tiny", dtype=dtype, block_size=block_size, num_prompts=3)
    assert report.good and report.values > 100_000


PLACES = {
    "rope-theta": "layers.0.q_rope", "rope-pairs": "layers.0.q_rope",
    "q-norm": "layers.2.q_norm", "q-bias": "layers.1.q_proj", "qkv-order": "layers.2.k_proj",
    "slot-border": "layers.0.k_cache", "stale-page": "layers.0.attention",
    "short-context": "layers.0.attention", "attention-scale": "layers.2.attention",
    "gate-up": "layers.2.mlp", "expert-shares": "layers.1.mlp", "expert-order": "layers.1.mlp",
    "residual": "layers.2.output", "final-norm": "norm",
    "untied-head": "logits", "stale-row": "embedding", "sampler-order": "token"}


def test_every_fault_has_a_known_place():
    assert PLACES.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_place(fault, checkpoint):
    model = str(checkpoint(MODEL_OF[fault])[0]) if fault in MODEL_OF else "tiny"
    report = verify(model, fault=fault)
    assert report.first is not None and report.first.op == PLACES[fault] == report.place
    assert report.good
    assert not report.first.relative <= report.tolerance


def test_the_slot_fault_shows_at_the_first_token_of_a_second_block():
    first = verify("tiny", fault="slot-border", block_size=4).first
    assert (first.prompt, first.position) == (2, 4)  # the first prompt longer than a block


@pytest.mark.parametrize("fault", ["stale-row", "stale-page", "short-context"])
def test_faults_of_decodes_show_after_the_prompts(fault):
    report = verify("tiny", fault=fault, num_prompts=2)
    assert report.first.step >= 1
    assert report.first.position >= report.prompts[report.first.prompt]


def test_a_token_that_differs_by_less_than_the_tolerance_is_a_near_tie(monkeypatch):
    attach = Probe.__init__

    def tied(self, engine, reference, tolerance):
        """Token 7 a little behind the best in the reference, a little before it here."""
        logits = reference.values["logits"]
        logits[:, 7] = logits.amax(dim=1) - 1e-6 * logits.abs().amax(dim=1)

        def ahead(module, args, out):
            out[:, 7] = out.amax(dim=1) + 1e-6 * out.abs().amax(dim=1)
        engine.runner.model.lm_head.register_forward_hook(ahead)
        attach(self, engine, reference, tolerance)

    monkeypatch.setattr(Probe, "__init__", tied)
    report = verify("tiny", num_prompts=2, num_outputs=3)
    assert report.good and len(report.near_ties) == 6
    tie = report.near_ties[0]
    assert tie.ours == 7 and 0 <= tie.margin < 1e-4


def test_prompts_lie_around_the_borders_of_blocks_and_two_share_one():
    prompts = make_prompts(6, 4, 97, 0)
    assert [len(prompt) for prompt in prompts] == [3, 4, 5, 11, 12, 13]
    assert prompts[5][:4] == prompts[4][:4]
    assert prompts == make_prompts(6, 4, 97, 0) != make_prompts(6, 4, 97, 1)


# -------------------------------------------------------------------------------- the command

def test_the_command_says_equal_and_its_json_says_good(run):  # noqa: F811
    status, out, err = run("verify", "--prompts", "2", "--output-len", "2")
    assert status == 0 and "equal within 0.0003" in out
    status, out, _ = run("verify", "--prompts", "2", "--output-len", "2", "--json")
    assert status == 0 and json.loads(out)["good"] is True


def test_the_command_names_a_fault_and_its_place(run):  # noqa: F811
    status, out, _ = run("verify", "--prompts", "3", "--inject", "q-norm")
    assert status == 0
    assert "first divergence: step 0, layers.2.q_norm, prompt 0 at position 0" in out
    assert "found: q-norm" in out


def test_a_real_fault_is_status_1(run, monkeypatch):  # noqa: F811
    from engine.models.qwen3 import Qwen3Attention
    monkeypatch.setattr(Qwen3Attention, "normalize", lambda self, qk: qk)
    status, out, _ = run("verify", "--prompts", "2", "--output-len", "2")
    assert status == 1 and "layers.0.q_rope" in out and "differs" in out


@pytest.mark.parametrize("arguments, sentence", [
    (("--inject", "slot-bodrer"), "did you mean slot-border?"),
    (("--inject", "q-bias"), "tiny has no bias of q, k and v: choose another"),
    (("--dtype", "bfloat16"), "too coarse to tell faults from rounding"),
    (("--prompts", "0"), "prompts=0 must be at least 1"),
    (("--model", "nix"), "model 'nix' is neither a known name")])
def test_a_mistake_is_one_sentence(arguments, sentence, run):  # noqa: F811
    status, out, err = run("verify", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize("fault, family, config, lacks", [
    ("expert-order", "qwen3-moe", {"num_experts": 1, "num_experts_per_tok": 1}, "second expert"),
    ("expert-shares", "qwen3-moe", {"num_experts": 2}, "expert that a token leaves out"),
    ("rope-theta", "llama", {"head_dim": 2}, "second rotary frequency"),
    ("rope-pairs", "llama", {"head_dim": 2}, "second rotary frequency")])
def test_a_fault_that_changes_nothing_in_this_model_is_refused(fault, family, config, lacks,
                                                              checkpoint):
    with pytest.raises(ConfigError, match=f"has no {lacks}: choose another fault or model"):
        verify(str(checkpoint(family, **config)[0]), fault=fault)


def test_a_directory_transformers_cannot_load_is_one_sentence(run, tmp_path, checkpoint):  # noqa: F811
    directory, _ = checkpoint("llama")
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": 5}))
    status, _, err = run("verify", "--model", str(tmp_path))
    assert status == 2 and "transformers cannot load" in err and err.count("\n") == 1


def test_a_damaged_checkpoint_is_one_sentence_with_the_way_out(run, tmp_path, checkpoint):  # noqa: F811
    directory, _ = checkpoint("llama")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    status, _, err = run("verify", "--model", str(tmp_path))
    assert status == 2 and "has no *.safetensors file" in err
    whole = (directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    status, _, err = run("verify", "--model", str(tmp_path))
    assert status == 2 and err.count("\n") == 1
    assert "is truncated or damaged" in err and err.endswith("fetch it again\n")


@pytest.mark.real_model
def test_smollm2_equals_transformers():
    with torch.inference_mode():
        assert verify("smollm2", num_prompts=3, num_outputs=4).good


# ------------------------------------------------------------------- set-ups that can show nothing

@pytest.mark.parametrize("fault, prompts, outputs, block_size, need", [
    ("sampler-order", 1, 3, 4, "2 prompts"), ("stale-row", 2, 1, 4, "2 tokens of output"),
    ("short-context", 2, 1, 4, "2 tokens of output"), ("stale-page", 3, 1, 4, "2 tokens of output"),
    ("stale-page", 1, 2, 4, "more than a block"), ("slot-border", 1, 1, 4, "more than a block"),
    ("rope-theta", 1, 1, 1, "2 computed tokens"),
    ("attention-scale", 1, 1, 1, "2 computed tokens")])
def test_a_fault_that_cannot_show_is_refused_with_what_it_takes(fault, prompts, outputs, block_size,
                                                                need):
    with pytest.raises(ConfigError, match=f"{fault} cannot show with prompts={prompts}.*{need}"):
        verify("tiny", fault=fault, num_prompts=prompts, num_outputs=outputs, block_size=block_size)


@pytest.mark.parametrize("fault, prompts, outputs, block_size", [
    ("sampler-order", 2, 1, 4), ("stale-row", 1, 2, 4), ("short-context", 1, 2, 4),
    ("stale-page", 1, 3, 4), ("slot-border", 1, 3, 4), ("rope-theta", 1, 2, 1),
    ("attention-scale", 1, 2, 1)])
def test_the_least_that_a_fault_takes_is_enough(fault, prompts, outputs, block_size):
    assert verify("tiny", fault=fault, num_prompts=prompts, num_outputs=outputs,
                  block_size=block_size).good


def test_requests_longer_than_the_model_serves_are_refused_before_the_reference_runs(monkeypatch):
    monkeypatch.setattr("engine.verify.check.Reference", lambda *args: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match="of up to 300011 tokens, and tiny serves 2048"):
        verify("tiny", block_size=100_000)  # the sixth prompt: 3 blocks and a token, and 10 more
    with pytest.raises(ConfigError, match="and tiny serves 2048"):
        verify("tiny", num_prompts=10**9)


def test_a_checkpoint_that_is_nan_for_transformers_too_is_no_divergence(monkeypatch):
    import engine.verify.reference as module
    load = module.load_reference

    def damaged(directory, dtype):
        model = load(directory, dtype)
        model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
        return model
    monkeypatch.setattr(module, "load_reference", damaged)
    with pytest.raises(VerifyError, match=r"itself computes nan in layers.1.mlp in float32"):
        verify("tiny", num_prompts=1, num_outputs=1)


def test_verify_is_no_work_for_torchrun(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="start it without torchrun"):
        verify("tiny")
