"""A model directory's config.json, read once and checked: what the layers need, nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.mistakes import file_sentence
from engine.models.fields import LONGEST, Fields
from engine.weights.errors import ModelNotFound, UnsupportedModel

MOST_LAYERS = 10_000
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
NEEDED = {  # what a rope type cannot do without, here or in transformers
    "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
# (field, its least value, whether it must lie above that); factors as transformers bounds them.
SCALING_RANGES = (
    ("factor", 1.0, False), ("original_max_position_embeddings", 1.0, False),
    ("low_freq_factor", 0.0, True), ("high_freq_factor", 0.0, True), ("beta_fast", 0.0, True),
    ("beta_slow", 0.0, True), ("attention_factor", 0.0, True), ("mscale", 0.0, False),
    ("mscale_all_dim", 0.0, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding as the checkpoint wants it; `scaling` holds the type's own numbers."""

    type: str = "default"  # one of ROPE_TYPES
    theta: float = 10000.0
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Field names are Hugging Face's."""

    name: str  # the directory's name, for logs and messages
    architecture: str  # as in config.json's `architectures`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # Llama's switch: bias on q, k, v and o
    mlp_bias: bool = False
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the shares of a token's experts are made to add up to 1
    decoder_sparse_step: int = 1  # every how many layers one has experts
    mlp_only_layers: tuple[int, ...] = ()  # layers that have none
    sliding_window: int | None = None  # attention is full only below this length
    dtype: str = "float32"  # the checkpoint's own
    eos_token_ids: tuple[int, ...] = ()  # generation_config's list, else config's

    def to_json(self) -> dict[str, Any]:
        """The shape for an event log's header."""
        return asdict(self)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes in all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize


def read_model_config(directory: Path) -> ModelConfig:
    """The directory's config.json (and generation_config.json, where there is one).

    ModelNotFound if there is no readable config.json; UnsupportedModel naming the first setting
    that this engine would compute wrongly.
    """
    raw = read_json(directory / "config.json")
    if raw is None:
        raise ModelNotFound(f"{directory} has no config.json: "
                            f"it is not a Hugging Face model directory")
    read = Fields(raw, f"{directory}/config.json")
    architectures = read.items("architectures", str, "class names")
    if not architectures:
        raise UnsupportedModel(f"{directory}/config.json names no architecture")
    _refuse(read, directory.name)
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.wrong("num_key_value_heads", kv_heads,
                         f"a divisor of num_attention_heads, which is {heads}")
    window = read.flag("use_sliding_window", True) and "sliding_window" in read
    return ModelConfig(
        name=directory.name,
        architecture=architectures[0],
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_hidden_layers=read.count("num_hidden_layers", most=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_read_head_dim(read, hidden // heads),
        max_position_embeddings=read.count("max_position_embeddings", 2048, LONGEST),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        rope=_read_rope(read, directory.name),
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
        **_read_experts(read),
        sliding_window=read.count("sliding_window", most=LONGEST) if window else None,
        dtype=read.text("dtype", read.text("torch_dtype", "float32")),
        eos_token_ids=_read_eos(raw, directory),
    )


def _read_head_dim(read: Fields, default: int) -> int:
    head_dim = read.count("head_dim", default)
    if head_dim % 2:
        raise read.wrong("head_dim", head_dim, "even: the channels are turned in pairs")
    return head_dim


def _read_experts(read: Fields) -> dict[str, Any]:
    """A mixture's fields; transformers 5 says num_local_experts where the hub says num_experts."""
    key = "num_local_experts" if read.values.get("num_local_experts") else "num_experts"
    if not read.values.get(key):
        return {}
    experts, each = read.count(key), read.count("num_experts_per_tok")
    if each > experts:
        raise read.wrong("num_experts_per_tok", each, f"at most {key}, which is {experts}")
    return {"num_experts": experts, "num_experts_per_tok": each,
            "moe_intermediate_size": read.count("moe_intermediate_size"),
            "norm_topk_prob": read.flag("norm_topk_prob", False),
            "decoder_sparse_step": read.count("decoder_sparse_step", 1),
            "mlp_only_layers": tuple(read.items("mlp_only_layers", int, "layer numbers"))}


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file. ModelNotFound if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFound(file_sentence(error, path, "a model's own file")) from None
    except ValueError as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ModelNotFound(f"{path} is damaged: not JSON{where}; fetch it again") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} holds no JSON object: fetch it again")
    return value


def _refuse(read: Fields, name: str) -> None:
    """Refuse by name whatever would give wrong numbers without an error."""
    activation = read.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{name}: hidden_act={activation!r} is not computed here; "
                               f"known: silu")
    quantized = read.table("quantization_config")
    if quantized:
        raise UnsupportedModel(f"{name}: {quantized.get('quant_method', 'unnamed')} quantization "
                               f"is not read here; take an unquantized checkpoint")
    if read.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{name}: partial_rotary_factor="
                               f"{read.values['partial_rotary_factor']} is not computed here")


def _read_rope(read: Fields, name: str) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; older files `rope_scaling` and a top-level theta."""
    both = [read.table(key) for key in ("rope_scaling", "rope_parameters")]
    kinds = [given.get("rope_type") or given.get("type") for given in both]
    if None not in kinds and kinds[0] != kinds[1]:
        raise UnsupportedModel(f"{name}: rope_scaling says {kinds[0]!r} and rope_parameters "
                               f"{kinds[1]!r}: remove one of them from config.json")
    settings = {**both[0], **both[1]}
    if any(isinstance(value, dict) for value in settings.values()):
        raise UnsupportedModel(f"{name}: rope parameters that differ by layer are not computed")
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{name}: rope type {kind!r} is not computed here; "
                               f"known: {', '.join(ROPE_TYPES)}")
    if settings.pop("partial_rotary_factor", 1.0) not in (1.0, None):
        raise UnsupportedModel(f"{name}: partial_rotary_factor is not computed here")
    given = Fields({"rope_theta": read.values.get("rope_theta"),
                    **{key: value for key, value in settings.items() if value is not None}},
                   read.where)
    settings.pop("rope_theta", None)
    _check_scaling(given, NEEDED.get(kind, ()))
    return RopeConfig(type=kind, theta=given.number("rope_theta", 10000.0, low=1.0, above=True,
                                                    high=1e30), scaling=settings)


def _check_scaling(given: Fields, needed: tuple[str, ...]) -> None:
    """What any rope type reads of its numbers must be able to stand in its formulas."""
    for key, low, above in SCALING_RANGES:
        if key in given or key in needed:
            given.number(key, low=low, above=above, high=float(LONGEST))
    if {"low_freq_factor", "high_freq_factor"} <= given.values.keys():
        low = given.number("low_freq_factor")
        given.number("high_freq_factor", low=low, above=True)
    given.flag("truncate", True)


def _read_eos(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    generation = read_json(directory / "generation_config.json") or {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    for named in (eos, raw.get("eos_token_id")):
        ids = named if isinstance(named, list) else [named]
        if named is not None and any(type(token) is not int for token in ids):
            raise UnsupportedModel(f"{directory}: eos_token_id={named!r} must be a token id or a "
                                   f"list of them")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
