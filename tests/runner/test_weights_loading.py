"""Checkpoints: sharded files, slices of a rank, and every way a checkpoint can be wrong."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.core.errors import ConfigError, TandemError
from engine.layers.shard import Shard
from engine.models.config import read_model_config
from engine.models.generation import read_sampling_defaults
from engine.models.registry import build_model
from engine.runner.model_runner import load_model, parse_dtype
from engine.weights.errors import ModelNotFound, UnsupportedModel, WeightsError
from engine.weights.loader import check_weights, checkpoint_slots, load_weights
from engine.weights.resolve import resolve_model
from tests.runner.tiny_models import FAMILIES

WEIGHTS = "model.safetensors"


def copy_of(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


def load(directory, **options):
    return load_model(read_model_config(directory), directory, torch.float32, **options)


def edit(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_wants_exactly_what_transformers_saves(family, checkpoint):
    directory, _ = checkpoint(family)
    config = read_model_config(directory)
    wanted = checkpoint_slots(build_model(config, Shard(), torch.float32))
    saved = load_file(directory / WEIGHTS)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        name: slot.shape for name, slot in wanted.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_slices_of_two_ranks_make_up_every_checkpoint_tensor(family, checkpoint):
    directory, _ = checkpoint(family, vocab_size=98)
    config = read_model_config(directory)
    ranks = []
    for rank in range(2):
        model = build_model(config, Shard(rank, 2), torch.float32)
        with torch.no_grad():
            load_weights(model, directory)
        ranks.append(checkpoint_slots(model))
    for name, tensor in load_file(directory / WEIGHTS).items():
        first, second = ranks[0][name], ranks[1][name]
        if first.region.shape == tensor.shape:
            joined = first.region
        else:
            joined = torch.cat((first.region, second.region), first.dim)
        assert torch.equal(joined, tensor), name


def test_heads_that_cannot_be_split_are_a_named_error(checkpoint):
    config = read_model_config(checkpoint("llama")[0])
    with pytest.raises(ConfigError, match="num_attention_heads=4 cannot be split.*size=3"):
        build_model(config, Shard(0, 3), torch.float32)


def test_a_checkpoint_in_several_files_loads_as_one(checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    whole = load(directory)
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        index.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, value in load(directory).state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="lacks 1 of 2 weight files.*model-00002-of-00002"):
        load(directory)


def test_the_first_missing_tensor_is_named(checkpoint, tmp_path):
    directory = copy_of(checkpoint("qwen3")[0], tmp_path)
    edit(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(WeightsError, match=r"lacks 1 of \d+ .*'model.layers.1.*k_norm.weight'"):
        load(directory)


def test_an_unexpected_tensor_is_named(checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    edit(directory, lambda tensors: tensors.update({"model.layers.7.mlp.weight": torch.zeros(2)}))
    with pytest.raises(WeightsError, match="'model.layers.7.mlp.weight'.*no place"):
        load(directory)


def test_tensors_that_follow_from_others_are_not_unexpected(checkpoint, tmp_path):
    directory = copy_of(checkpoint("qwen3")[0], tmp_path)
    edit(directory, lambda tensors: tensors.update({
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(directory)


def add_a_head(directory, row=None):
    """Of its own; like the embedding but for one row, if a `row` is given."""
    def change(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[slice(None) if row is None else row] += 1.0
        tensors["lm_head.weight"] = head
    edit(directory, change)


@pytest.mark.parametrize("row", [None, 0, -1])
@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)])
def test_a_tied_model_with_a_head_of_its_own_is_refused_by_the_rank_that_sees_it(
        row, shard, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.weights.loader.ROWS", 10)
    directory = copy_of(checkpoint("qwen3")[0], tmp_path)
    add_a_head(directory, row)
    if shard.size == 2 and row is not None and row != -shard.rank:
        load(directory, shard=shard)  # the other one's row
        return
    with pytest.raises(WeightsError, match="'lm_head.weight' that is not the embedding.*"
                                           "tie_word_embeddings=true.* set that to false"):
        load(directory, shard=shard)


def test_the_head_of_a_tied_model_is_compared_across_files_and_without_a_device(
        checkpoint, tmp_path):
    directory = copy_of(checkpoint("qwen3")[0], tmp_path)
    add_a_head(directory)
    tensors = load_file(directory / WEIGHTS)
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, directory / "model-2.safetensors")
    save_file(tensors, directory / WEIGHTS)
    with torch.device("meta"):
        model = build_model(read_model_config(directory), Shard(), torch.float32)
    with pytest.raises(WeightsError, match="model-2.safetensors holds a 'lm_head.weight' that"):
        check_weights(model, directory)


@pytest.mark.parametrize("files", [1, None, ["a"], {"a": "b"}])
def test_an_index_whose_files_are_no_names_is_damaged(files, checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": files, "b": WEIGHTS}}))
    with pytest.raises(WeightsError, match="index.json is damaged.*fetch it again"):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantized_weights_are_named_not_taken_for_numbers(dtype, checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edit(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(WeightsError, match=f"'{name}' in .* quantized weights are not read"):
        load(directory)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    edit(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(WeightsError, match=r"'model.norm.weight'.*\[31\].*\[32\]"):
        load(directory)


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 0.9999))
def test_a_file_cut_at_any_byte_is_a_named_error(share, checkpoint, tmp_path_factory):
    directory = copy_of(checkpoint("llama")[0], tmp_path_factory.mktemp("cut"))
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:int(len(content) * share)])
    with pytest.raises(WeightsError, match="truncated or damaged"):
        load(directory)


FILES = sorted(path.name for path in resolve_model("tiny").glob("*.json"))


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(FILES), share=st.floats(0, 1))
def test_any_file_cut_at_any_byte_is_a_named_error_or_does_not_matter(
        name, share, tmp_path_factory):
    directory = shutil.copytree(resolve_model("tiny"), tmp_path_factory.mktemp("cut") / "tiny")
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[:int(len(content) * share)])
    try:
        with LLM(directory, max_model_len=16, num_kv_blocks=1) as llm:
            (out,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    except TandemError as error:
        assert name in str(error) or "tokenizer" in str(error)
    else:
        assert len(out.token_ids) == 2


def test_a_directory_without_safetensors_says_so(checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    (directory / WEIGHTS).unlink()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        load(directory)


def test_an_unknown_architecture_lists_the_known_ones(checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    raw["architectures"] = ["GPT2LMHeadModel"]
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel.*known: LlamaForCausalLM"):
        load(directory)


def test_dummy_weights_are_the_same_for_the_same_seed(checkpoint):
    directory, _ = checkpoint("llama")
    first, second = (load(directory, load_format="dummy").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_generation_config_with_several_ends_wins_over_the_config(checkpoint, tmp_path):
    directory = copy_of(checkpoint("llama")[0], tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert read_model_config(directory).eos_token_ids == (5, 9)


@pytest.mark.parametrize("name", ["nix", "./nowhere", "/no/such/place"])
def test_an_unknown_model_lists_the_known_names(name):
    with pytest.raises(ModelNotFound, match="tiny, smollm2"):
        resolve_model(name)


def test_a_hub_id_that_the_hub_does_not_give_names_what_works_without_it():
    with pytest.raises(ModelNotFound, match="known without the hub: tiny, smollm2"):
        resolve_model("no-such-owner/no-such-model")


def test_a_model_that_can_be_pulled_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="python -m engine pull smollm2"):
        resolve_model("smollm2")


def test_a_directory_without_a_config_and_one_with_half_a_config_are_named(tmp_path):
    with pytest.raises(ModelNotFound, match="no config.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelNotFound, match="not JSON"):
        read_model_config(tmp_path)


def test_auto_is_the_checkpoints_dtype_but_float32_for_half_precision_on_a_cpu():
    assert parse_dtype("auto", "bfloat16", "cuda") is torch.bfloat16
    assert parse_dtype("auto", "bfloat16", "cpu") is torch.float32
    assert parse_dtype("auto", "float64", "cpu") is torch.float64
    assert parse_dtype("bfloat16", "float32", "cpu") is torch.bfloat16


def test_an_unknown_dtype_lists_the_known_ones():
    assert parse_dtype("fp64", "bfloat16") is torch.float64
    with pytest.raises(TandemError, match="'int4'.*known: auto, float32"):
        parse_dtype("int4", "bfloat16")


# ------------------------------------------------------------------------- generation_config.json

def defaults_of(directory, tmp_path, **generation):
    target = shutil.copytree(directory, tmp_path / f"model{len(list(tmp_path.iterdir()))}")
    (target / "generation_config.json").write_text(json.dumps(generation))
    return read_sampling_defaults(target)


def test_sampling_defaults_are_the_models_where_it_has_some(checkpoint, tmp_path):
    directory, _ = checkpoint("qwen3")
    found = defaults_of(directory, tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95,
                        repetition_penalty=1.05, min_p=None, max_new_tokens=99, pad_token_id=3,
                        stop_strings="###", eos_token_id=[1, 2])
    assert found == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05,
                                   max_tokens=99, stop=("###",))
    assert defaults_of(directory, tmp_path) == SamplingParams()
    assert defaults_of(directory, tmp_path, top_k=50) == SamplingParams(top_k=50)
    greedy = defaults_of(directory, tmp_path, do_sample=False, temperature=0.6, top_k=20)
    assert greedy == SamplingParams(temperature=0.0)


def test_a_default_that_cannot_be_is_named_with_its_file(checkpoint, tmp_path):
    with pytest.raises(UnsupportedModel, match="generation_config.json: top_p=1.5 must lie in"):
        defaults_of(checkpoint("qwen3")[0], tmp_path, top_p=1.5)


def test_requests_without_params_get_the_models_and_explicit_params_hold_alone(
        checkpoint, tmp_path):
    target = shutil.copytree(checkpoint("qwen3")[0], tmp_path / "model")
    (target / "generation_config.json").write_text(json.dumps(
        {"do_sample": True, "temperature": 0.6, "top_k": 1, "max_new_tokens": 5}))
    llm = LLM(target, max_model_len=32)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=1,
                                                               max_tokens=5)
    best = SamplingParams(temperature=0.0, max_tokens=5)
    (own,), (greedy,) = llm.generate([[5, 6, 7]]), llm.generate([[5, 6, 7]], best)
    assert own.token_ids == greedy.token_ids and len(own.token_ids) == 5  # top_k 1: the best
    drawn = [llm.generate([[5, 6, 7]], SamplingParams(temperature=3.0, seed=seed))[0].token_ids
             for seed in range(3)]
    assert all(len(ids) == 16 for ids in drawn) and len(set(map(tuple, drawn))) == 3
