"""Models and devices: right values by hand, and one-sentence errors."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from simulator.basis import Reference
from simulator.cost import Roofline
from simulator.errors import SpecError
from simulator.fitted import Fitted, Machine
from simulator.hardware import Efficiency, kv_blocks, list_hardware, load_hardware
from simulator.modelspec import from_header, list_models, load_model
from simulator.shape import Shape

CONFIG = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
          "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936,
          "tie_word_embeddings": True, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("name, kv_bytes, billions", [
    ("qwen3-0.6b", 114_688, 0.596), ("llama-3.1-8b", 131_072, 8.03), ("qwen3-32b", 262_144, 32.76),
    ("smollm2-135m", 23_040, 0.1345)])
def test_kv_bytes_a_token_and_parameters_are_those_of_the_published_model(name, kv_bytes, billions):
    model = load_model(name)
    assert model.kv_bytes_per_token == kv_bytes
    assert model.params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_head_dim_is_data_and_not_hidden_over_heads():
    qwen = load_model("qwen3-0.6b")
    assert (qwen.head_dim, qwen.hidden // qwen.heads) == (128, 64)


def test_hub_ids_of_known_models_are_understood():
    assert load_model("meta-llama/Llama-3.1-8B-Instruct") == load_model("llama-3.1-8b")
    assert load_model("Qwen/Qwen3-0.6B").name == "qwen3-0.6b"


def test_every_shipped_model_and_device_loads():
    for name in list_models():
        load_model(name).check_tp(1)
    for name in list_hardware():
        assert load_hardware(name).name == name


def test_a_directory_with_config_json_gives_the_same_shape_as_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    own, table = load_model(str(tmp_path)), load_model("qwen3-0.6b")
    assert own.as_dict() | {"name": ""} == table.as_dict() | {"name": ""}


@pytest.mark.parametrize("text, words", [
    ("{", "not JSON"), ("[1]", "holds a list"), ("{}", "num_attention_heads"),
    (json.dumps(CONFIG | {"vocab_size": -1}), "vocab_size=-1"),
    (json.dumps(CONFIG | {"num_experts": 8}), "mixture-of-experts"),
    (json.dumps(CONFIG | {"n_routed_experts": 256}), "mixture-of-experts"),
    (json.dumps(CONFIG | {"kv_lora_rank": 512}), "multi-head latent attention"),
    (json.dumps(CONFIG | {"mamba_d_state": 128}), "keep no K/V"),
    (json.dumps(CONFIG | {"torch_dtype": "int3"}), "int3"),
    (json.dumps(CONFIG | {"num_key_value_heads": "8"}), "num_key_value_heads='8' must be a whole"),
    (json.dumps(CONFIG | {"num_key_value_heads": -8}), "num_key_value_heads=-8 must be"),
    (json.dumps(CONFIG | {"num_key_value_heads": 3}), "16 query heads do not divide among 3 KV"),
    (json.dumps(CONFIG | {"head_dim": "x"}), "head_dim='x' must be"),
    (json.dumps(CONFIG | {"head_dim": 1.5}), "head_dim=1.5 must be a whole number"),
    (json.dumps(CONFIG | {"vocab_size": 10**400}), "from 1 to 100,000,000"),
    (json.dumps(CONFIG).replace("151936", "9" * 5000), "thousands of digits"),
    (json.dumps(CONFIG | {"tie_word_embeddings": "no"}), "'no' must be true or false"),
    ('{"text_config": 5}', "text_config=5 must be a table"),
    ('{"text_config": null}', "num_attention_heads")])
def test_a_config_that_cannot_work_is_one_sentence_with_the_file(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        load_model(str(path))
    assert str(path) in str(error.value) and words in str(error.value)
    assert "\n" not in str(error.value)


def test_fields_that_a_config_leaves_out_or_sets_to_null_are_what_its_class_sets_then(tmp_path):
    path = tmp_path / "config.json"
    unset = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": None,
             "n_routed_experts": None, "num_experts": 1}  # one expert: a dense model
    path.write_text(json.dumps(CONFIG | unset))
    model = load_model(str(path))
    assert (model.kv_heads, model.head_dim, model.tied) == (16, 1024 // 16, False)
    path.write_text(json.dumps({"text_config": CONFIG}))
    assert load_model(str(path)).head_dim == 128


@pytest.mark.parametrize("wrong", [{"tied": 1}, {"dtype_bytes": "2"}, {"kv_heads": 3}])
def test_the_model_of_a_logs_header_is_checked_like_a_config(wrong):
    with pytest.raises(SpecError, match="the log's header"):
        from_header(load_model("llama-3.1-8b").as_dict() | wrong)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'llama-3.1-8b'.*qwen3-0.6b.*config.json"):
        load_model("llama-3.1-8c")
    with pytest.raises(SpecError, match="'h10'.*did you mean 'h100'.*rtx-4090.*file.toml"):
        load_hardware("h10")
    with pytest.raises(SpecError, match="unknown model ''.*qwen3-0.6b"):
        load_model("")


@pytest.mark.parametrize("model, tp, blocks", [  # published by vLLM 0.15.1: published_points.csv
    ("qwen2.5-7b", 1, 65_368), ("mistral-nemo-12b", 1, 19_251), ("llama-3.1-70b", 4, 30_425)])
def test_pools_on_an_h100_are_within_half_a_percent_of_vllms_block_counts(model, tp, blocks):
    got = kv_blocks(load_model(model), load_hardware("h100"), 16, tp=tp)
    assert got == pytest.approx(blocks, rel=0.005)


def test_the_pool_is_memory_less_weights_and_reserve_by_hand():
    model, device = load_model("llama-3.1-8b"), load_hardware("a100-80")
    free = 0.9 * 79.15 * 2**30 - 8_029_995_008 * 2 - 1.3 * 2**30
    assert kv_blocks(model, device, 16) == int(free / (16 * 131_072)) == 28_148


def test_a_model_that_does_not_fit_says_the_arithmetic():
    with pytest.raises(SpecError, match=r"0.9 x 22.2 GiB - 131.4 GiB weights - 1.3 GiB reserve"):
        kv_blocks(load_model("llama-3.1-70b"), load_hardware("l4"), 16)


def test_ones_own_hardware_file_may_build_on_a_known_device(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100"\nbandwidth = 3000\n[efficiency]\np_norm = inf\n')
    own, base = load_hardware(str(path)), load_hardware("h100")
    assert (own.name, own.bandwidth, own.tflops) == ("mine", 3000.0, base.tflops)
    assert own.efficiency.p_norm == float("inf")
    assert own.efficiency.gemm_flops == base.efficiency.gemm_flops


@pytest.mark.parametrize("text, words", [
    ("tflops = 10", "'bandwidth' is missing"), ("tflops = [", "not TOML"),
    ('base = "h100"\nbandwith = 3', "unknown field 'bandwith'"),
    ('base = "h100"\ntflops = -1', "tflops=-1 must be a number from 0.001 to 1,000,000"),
    ('base = "h100"\nlink_kind = "wifi"', "'nvlink' or 'pcie'"),
    ('base = "nope"', "unknown hardware 'nope'"),
    ('base = "h100"\n[efficiency]\ngemm = 1', "unknown efficiency 'gemm'"),
    ('base = "h100"\n[efficiency]\np_norm = 0.5', "p_norm=0.5 must be a number from 1 to 16, or")])
def test_a_hardware_file_that_cannot_work_names_the_field(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        load_hardware(str(path))
    assert words in str(error.value)


def fields_of_a_device():
    """Every number of a device file, as (line before, field, what no device has)."""
    rates = [("", field, wrong) for field in ("tflops", "bandwidth", "memory", "link", "pcie")
             for wrong in ("0", "inf", "nan", "-1", "1e-300", "1e300", "'x'", "true", "[1]")]
    share = [("", "utilization", wrong) for wrong in ("0", "1.01", "nan", "'abc'", "[1]")]
    rest = [("", "reserve_gib", wrong) for wrong in ("'x'", "[1]", "nan", "-inf", "inf", "-1")]
    kinds = [("[efficiency]\n", field.name, wrong) for field in dataclasses.fields(Efficiency)
             for wrong in ("nan", "-1", "1e308", "-inf", "'x'", "true")]
    more = [("[efficiency]\n", "gemm_flops", "1e-308"), ("[efficiency]\n", "p_norm", "1000"),
            ("[efficiency]\n", "graph_max", "512.0"), ("[efficiency]\n", "layer_us", "inf"),
            ("", "efficiency", "5")]
    return rates + share + rest + kinds + more


@pytest.mark.parametrize("before, field, wrong", fields_of_a_device())
def test_no_number_of_a_hardware_file_is_taken_unchecked(tmp_path, before, field, wrong):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "h100"\n{before}{field} = {wrong}\n')
    with pytest.raises(SpecError, match=f"{path}.*{field}=.* must be ") as error:
        load_hardware(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("norm", [1, 16, "inf"])
def test_the_ends_of_a_range_price_a_step(tmp_path, norm):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "h100"\ntflops = 1e6\nbandwidth = 1e8\n'
                    f'[efficiency]\np_norm = {norm}\n')
    tiny = dataclasses.replace(load_model("smollm2-135m"), hidden=8, intermediate=8, vocab=8)
    cost = Roofline(tiny, load_hardware(str(path))).price(Shape(1, 1, 1, 1, 0, 0, 0, 0.0))
    assert 0 < cost.seconds < 2e-3 and cost.weights > 0  # step_us is 1 ms, 30 layers 12 us each


@pytest.mark.parametrize("share", [0, 1.5, math.nan, "0.9", None])
def test_a_share_of_memory_that_cannot_be_is_refused(share):
    model, device = load_model("llama-3.1-8b"), load_hardware("h100")
    if share is None:
        assert kv_blocks(model, device, 16) == kv_blocks(model, device, 16, utilization=0.9)
        return
    with pytest.raises(SpecError, match="gpu_memory_utilization=.* from 0.01 to 1"):
        kv_blocks(model, device, 16, utilization=share)


@pytest.mark.parametrize("tp", [0, -2, 3, 2.0, True, "2", math.nan])
def test_a_split_there_is_not_is_refused_by_whatever_gives_a_ranks_share(tp):
    model, device = load_model("llama-3.1-8b"), load_hardware("h100")
    machine = Machine("m", Reference(1.0, 1.0), {"step": 1.0})
    for share in (lambda: kv_blocks(model, device, 16, tp=tp), lambda: model.weight_bytes(tp),
                  lambda: Roofline(model, device, tp=tp), lambda: Fitted(machine, model, tp=tp),
                  lambda: model.rank_kv_bytes_per_token(tp)):
        with pytest.raises(SpecError, match="32 query heads.*tp=.*: use a divisor of 32"):
            share()


def test_query_heads_that_do_not_divide_among_ranks_are_refused():
    with pytest.raises(SpecError, match="32 query heads, which do not divide among tp=3"):
        load_model("llama-3.1-8b").check_tp(3)


def test_more_ranks_than_kv_heads_repeat_them():
    model = load_model("llama-3.1-70b")
    assert model.rank_kv_heads(4) == 2 and model.rank_kv_heads(16) == 1
    model.check_tp(16)
