"""A model directory's config.json, read once and checked: what the layers need, nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.mistakes import file_sentence
from engine.weights.errors import ModelNotFound, UnsupportedModel

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


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
    architectures = raw.get("architectures") or []
    if not architectures:
        raise UnsupportedModel(f"{directory}/config.json names no architecture")
    _refuse(raw, directory.name)
    heads = _need(raw, "num_attention_heads", directory)
    hidden = _need(raw, "hidden_size", directory)
    return ModelConfig(
        name=directory.name,
        architecture=architectures[0],
        vocab_size=_need(raw, "vocab_size", directory),
        hidden_size=hidden,
        intermediate_size=_need(raw, "intermediate_size", directory),
        num_hidden_layers=_need(raw, "num_hidden_layers", directory),
        num_attention_heads=heads,
        num_key_value_heads=heads if raw.get("num_key_value_heads") is None else _need(
            raw, "num_key_value_heads", directory),
        head_dim=raw.get("head_dim") or hidden // heads,
        max_position_embeddings=raw.get("max_position_embeddings") or 2048,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6, directory),
        rope=_read_rope(raw, directory.name),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        **_read_experts(raw, directory),
        sliding_window=raw.get("sliding_window") if raw.get("use_sliding_window", True) else None,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        eos_token_ids=_read_eos(raw, directory),
    )


def _read_experts(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A mixture's fields; transformers 5 says num_local_experts where the hub says num_experts."""
    if not raw.get("num_local_experts") and not raw.get("num_experts"):
        return {}
    raw = {**raw, "num_experts": raw.get("num_local_experts") or raw.get("num_experts")}
    numbers = {key: _need(raw, key, directory)
               for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    if numbers["num_experts_per_tok"] > numbers["num_experts"]:
        raise UnsupportedModel(f"{directory}/config.json: num_experts_per_tok="
                               f"{numbers['num_experts_per_tok']} of {numbers['num_experts']}")
    step = raw.get("decoder_sparse_step")
    return {**numbers, "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
            "decoder_sparse_step": 1 if step is None else _need(raw, "decoder_sparse_step",
                                                                directory),
            "mlp_only_layers": tuple(raw.get("mlp_only_layers") or ())}


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


def _need(raw: dict[str, Any], key: str, directory: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{directory}/config.json: {key}={value!r} must be a number above 0")
    return value


def _number(raw: dict[str, Any], key: str, default: float, directory: Path) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or value < 0:
        raise UnsupportedModel(f"{directory}/config.json: {key}={value!r} must be a number, "
                               f"at least 0")
    return float(value)


def _refuse(raw: dict[str, Any], name: str) -> None:
    """Refuse by name whatever would give wrong numbers without an error."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{name}: hidden_act={activation!r} is not computed here; "
                               f"known: silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModel(f"{name}: {method} quantization is not read here; "
                               f"take an unquantized checkpoint")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{name}: partial_rotary_factor={raw['partial_rotary_factor']} "
                               f"is not computed here")


def _read_rope(raw: dict[str, Any], name: str) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; older files `rope_scaling` and a top-level theta."""
    both = [raw.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
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
    if settings.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{name}: partial_rotary_factor is not computed here")
    theta = settings.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    return RopeConfig(type=kind, theta=float(theta), scaling=settings)


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
