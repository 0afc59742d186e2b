"""The shape of a decoder-only transformer, and what it weighs: weights, and K/V a token."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.core.params import is_whole
from simulator.errors import SpecError, unknown
from simulator.plain import plain
from simulator.tables import Range, flag, number, packaged, read_json, subtable

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
# Of each field, more than any published model has; beyond these a value is a slip of the pen.
_WHOLE = {"layers": Range(1, 10_000, whole=True), "hidden": Range(1, 1_000_000, whole=True),
          "heads": Range(1, 100_000, whole=True), "kv_heads": Range(1, 100_000, whole=True),
          "head_dim": Range(1, 100_000, whole=True),
          "intermediate": Range(1, 10_000_000, whole=True),
          "vocab": Range(1, 100_000_000, whole=True),
          "max_len": Range(1, 1_000_000_000, whole=True)}
_BYTES = Range(1, 8, whole=True)
_HUGGING_FACE = {"layers": "num_hidden_layers", "hidden": "hidden_size",
                 "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
                 "head_dim": "head_dim", "intermediate": "intermediate_size",
                 "vocab": "vocab_size", "max_len": "max_position_embeddings"}
# Fields of a config.json by which layers are something else than attention and one MLP.
_EXPERTS, _NO_HEADS = "mixture-of-experts models", "layers that keep no K/V of heads"
_OTHER_LAYERS = {
    "num_experts": _EXPERTS, "num_local_experts": _EXPERTS, "n_routed_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS, "kv_lora_rank": "multi-head latent attention",
    "mamba_d_state": _NO_HEADS, "mamba_d_ssm": _NO_HEADS, "ssm_state_size": _NO_HEADS,
    "linear_num_key_heads": _NO_HEADS}
_SUFFIXES = ("-instruct", "-chat", "-base", "-it", "-hf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model. Counts are of the whole model; `tp` arguments give one rank's share."""

    name: str
    layers: int
    hidden: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int  # never hidden / heads: Qwen3 breaks that
    intermediate: int
    vocab: int
    tied: bool  # the LM head shares the embedding's weights
    max_len: int  # longest context the published config allows
    dtype_bytes: int = 2  # of weights, activations and K/V

    @property
    def layer_params(self) -> int:
        """Weights of one layer's projections (norms and biases are left out: under 0.1 %)."""
        attention = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        output = self.heads * self.head_dim * self.hidden
        return attention + output + 3 * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        """All weights; the embedding counts once when it is tied to the LM head."""
        return self.layers * self.layer_params + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of a token, all layers: 2 · layers · kv_heads · head_dim · bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def rank_kv_heads(self, tp: int) -> int:
        """KV heads one of `tp` ranks holds; heads are replicated when there are more ranks."""
        self.check_tp(tp)
        return max(1, self.kv_heads // tp)

    def rank_kv_bytes_per_token(self, tp: int) -> int:
        """Bytes of K and V of one token on one of `tp` ranks."""
        return 2 * self.layers * self.rank_kv_heads(tp) * self.head_dim * self.dtype_bytes

    def weight_bytes(self, tp: int = 1) -> float:
        """Bytes of weights on one of `tp` ranks (everything is sharded, the embedding too)."""
        self.check_tp(tp)
        return self.params * self.dtype_bytes / tp

    def check_tp(self, tp: int) -> None:
        """SpecError unless query heads divide among `tp` ranks, and KV heads do or repeat.

        Whatever gives a rank's share calls it, so that no price or pool is of a split there is not.
        """
        if not is_whole(plain(tp)) or tp < 1 or self.heads % tp:
            raise SpecError(f"{self.name} has {self.heads} query heads, which do not divide among "
                            f"tp={tp!r} ranks: use a divisor of {self.heads}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise SpecError(f"{self.name} has {self.kv_heads} KV heads: tp={tp} neither divides "
                            f"them nor repeats them evenly")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a log header; `ModelSpec(**d)` builds it back."""
        return asdict(self)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return packaged("models.toml")


def list_models() -> list[str]:
    """Names of the models that ship with the simulator, sorted."""
    return sorted(_table())


def load_model(name: str) -> ModelSpec:
    """A model by table name, hub id of a known model, directory, or config.json.

    SpecError, with the known names, for anything else.
    """
    path = Path(name)
    if name and (path.is_dir() or path.suffix == ".json"):
        return from_config(path / "config.json" if path.is_dir() else path)
    table = _table()
    key = _canonical(name)
    if key not in table:
        raise unknown("model", name, table, "or give a directory with config.json")
    return _from_row(key, table[key], f"models.toml [{key}]")


def from_config(path: Path) -> ModelSpec:
    """A model from its Hugging Face config.json. SpecError names file and field that is missing."""
    config, where = read_json(path, "a Hugging Face config.json"), str(path)
    text = subtable(config, "text_config", where)  # of a model that also sees
    return _from_hugging_face(text or config, path.parent.name, where)


def from_header(model: Mapping[str, Any]) -> ModelSpec:
    """The model of an event log's header, written by either mode. SpecError if it is no model."""
    name = str(model.get("name", "model"))
    if "kv_heads" in model:
        return _from_row(name, model, "the log's header")
    return _from_hugging_face(model, name, "the log's header")


def _from_hugging_face(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPE_BYTES:
        raise SpecError(f"{where}: dtype {dtype!r} is not one of {', '.join(_DTYPE_BYTES)}")
    for key, what in _OTHER_LAYERS.items():
        if config.get(key) not in (None, 0, 1):  # one expert is a dense model
            raise SpecError(f"{where}: {what} are not modelled yet ({key} is set): choose a dense "
                            f"model")
    given = {key: value for key, value in config.items() if value is not None}
    heads = number(given, "num_attention_heads", where, _WHOLE["heads"])
    hidden = number(given, "hidden_size", where, _WHOLE["hidden"])
    # What is left out is what the config classes set then.
    given = {"num_key_value_heads": heads, "head_dim": max(1, hidden // heads), **given}
    values = {field: number(given, key, where, _WHOLE[field])
              for field, key in _HUGGING_FACE.items()}
    return _checked(ModelSpec(
        name=name or str(config.get("model_type", "model")), dtype_bytes=_DTYPE_BYTES[dtype],
        tied=flag(config, "tie_word_embeddings", where), **values), where)


def _from_row(name: str, row: Mapping[str, Any], where: str) -> ModelSpec:
    values = {key: number(row, key, where, allowed) for key, allowed in _WHOLE.items()}
    size = _BYTES.check(row.get("dtype_bytes", 2), f"{where}: dtype_bytes")
    return _checked(ModelSpec(name=name, tied=flag(row, "tied", where), dtype_bytes=size, **values),
                    where)


def _checked(model: ModelSpec, where: str) -> ModelSpec:
    """The model, if its heads can share K/V. SpecError if not."""
    if model.heads % model.kv_heads:
        raise SpecError(f"{where}: {model.heads} query heads do not divide among {model.kv_heads} "
                        f"KV heads: one of the two is wrong")
    return model


def _canonical(name: str) -> str:
    """`meta-llama/Llama-3.1-8B-Instruct` → `llama-3.1-8b`."""
    key = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for suffix in _SUFFIXES:
        key = key.removesuffix(suffix)
    return {"smollm2": "smollm2-135m"}.get(key, key)
