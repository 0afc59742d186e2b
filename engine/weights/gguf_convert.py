"""A Llama-architecture GGUF file into a Hugging Face directory.

transformers reads GGUF but refuses to save what it read, and guesses the pre-tokenizer; so the
few things a directory needs are written here: config, generation_config, tokenizer, safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.weights.errors import PullError

CONTROL = 3  # GGUF's token type for special tokens
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, target: Path) -> None:
    """Write `target` (a new directory) from the GGUF file `source`.

    Weights are stored as float16, which holds 4-bit values times float16 scales better than
    bfloat16 does: stored as bfloat16, SmolLM2's first answer becomes a tie. The config asks for
    float32 arithmetic. PullError if it is no Llama model with a byte-level BPE tokenizer.
    """
    reader = gguf.GGUFReader(str(source))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    kind, tokens = meta.get("general.architecture"), meta.get("tokenizer.ggml.model")
    if kind != "llama" or tokens != "gpt2":
        raise PullError(
            f"{source.name} holds a {kind!r} model with a {tokens!r} tokenizer; "
            f"converted are llama models with a gpt2 tokenizer"
        )
    config = _config(meta, {tensor.name for tensor in reader.tensors})
    target.mkdir(parents=True)
    _write_weights(reader, config, target)
    _write_tokenizer(meta, target)
    _write_json(target / "config.json", config)
    _write_json(
        target / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": False,
        },
    )


def _config(meta: dict[str, Any], names: set[str]) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 12),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def _write_weights(reader: Any, config: dict[str, Any], target: Path) -> None:
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = _unpermute(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = _unpermute(values, config["num_key_value_heads"])
        weights[_hf_name(tensor.name)] = torch.from_numpy(np.array(values)).to(torch.float16)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[1]}"


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF pairs rotary channels (2i, 2i + 1); Hugging Face pairs (i, i + head_dim / 2)."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(meta: dict[str, Any], target: Path) -> None:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    special = {
        f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta.get("tokenizer.chat_template"),
            **special,
        },
    )


def _pre_tokenizer(name: str) -> Any:
    """SmolLM splits numbers into digits, then as GPT-2 does."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    if name in ("default", "gpt-2"):
        return gpt2
    raise PullError(
        f"pre-tokenizer {name!r} of the GGUF file is not converted; known: smollm, gpt-2"
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
