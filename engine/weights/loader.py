"""Safetensors into a model: streamed, sliced per rank, every tensor accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.layers.shard import Loadable, Slot
from engine.weights.errors import WeightsError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 4096  # of a matrix that are compared at once
FLOATS = ("BF16", "F16", "F32", "F64")  # safetensors' names of what a weight may be stored in


def load_weights(model: nn.Module, directory: Path) -> None:
    """Fill every parameter of `model` from the directory's safetensors files.

    Only the slice a rank needs is read, one tensor at a time. WeightsError names the first tensor
    that is missing, unknown to the model, of the wrong shape, or that lies in an unreadable file;
    the model is then unusable.
    """
    for slot, tensor in _placed(model, directory):
        end = slot.start + slot.region.shape[slot.dim]
        part = tensor[:, slot.start : end] if slot.dim == 1 else tensor[slot.start : end]
        slot.region.copy_(part)


def check_weights(model: nn.Module, directory: Path) -> None:
    """Raise what load_weights() would, reading no weights but a head that may be superfluous:
    `model` may lie on no device (meta)."""
    for _ in _placed(model, directory):
        pass


def _placed(model: nn.Module, directory: Path) -> Iterator[tuple[Slot, Any]]:
    """(slot, lazy tensor) of every tensor that the model wants; after them, WeightsError if some
    are missing, or if a head is there that a tied model would leave out."""
    slots = checkpoint_slots(model)
    open_slots = dict.fromkeys(slots)  # an ordered set of names still to come
    tied = HEAD not in slots
    ends: dict[str, Path] = {}  # where the two tensors lie that a tied model has one of
    for path in shard_files(directory):
        for name, tensor in _tensors(path):
            slot = slots.get(name)
            if name in (EMBEDDING, HEAD):
                ends[name] = path
            if slot is None:
                if _is_derived(name, tied):
                    continue
                raise WeightsError(
                    f"{path.name} holds {name!r}, which the model has no place for: "
                    f"the weights are not those of this config.json"
                )
            shape = tuple(tensor.get_shape())
            if shape != slot.shape:
                raise WeightsError(
                    f"{name!r} in {path.name} has shape {list(shape)}, the model of this "
                    f"config.json needs {list(slot.shape)}"
                )
            if (dtype := tensor.get_dtype()) not in FLOATS:
                raise WeightsError(f"{name!r} in {path.name} holds {dtype} numbers: quantized "
                                   f"weights are not read; fetch a checkpoint in bf16, fp16 or "
                                   f"fp32")
            yield slot, tensor
            open_slots.pop(name, None)
    if open_slots:
        raise WeightsError(
            f"{directory} lacks {len(open_slots)} of {len(slots)} tensors, the first "
            f"is {next(iter(open_slots))!r}: the checkpoint is incomplete, "
            f"fetch it again"
        )
    if tied and len(ends) == 2:
        _check_head(ends, slots[EMBEDDING])


def _check_head(ends: dict[str, Path], slot: Slot) -> None:
    """WeightsError unless the head of a tied model is its embedding once more, over this rank's
    `slot` of it. Others do not agree on which of the two to take: transformers 5 takes the head."""
    with (safe_open(str(ends[EMBEDDING]), framework="pt") as one,
          safe_open(str(ends[HEAD]), framework="pt") as other):
        embedding, head = one.get_slice(EMBEDDING), other.get_slice(HEAD)
        end, same = slot.start + len(slot.region), head.get_shape() == embedding.get_shape()
        for row in range(slot.start, end, ROWS):
            rows = slice(row, min(row + ROWS, end))
            same = same and torch.equal(embedding[rows].to(slot.region.dtype),
                                        head[rows].to(slot.region.dtype))
    if not same:
        raise WeightsError(
            f"{ends[HEAD].name} holds a {HEAD!r} that is not the embedding, and config.json says "
            f"tie_word_embeddings=true, to use the embedding for it: set that to false to use this "
            f"head, or take the tensor out of the file")


def dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Small random weights instead of a checkpoint's, for timing: the same for the same seed."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def prepare_layers(model: nn.Module) -> None:
    """Let every layer trade its loaded weights for its fastest layout."""
    for module in model.modules():
        prepare = getattr(module, "prepare", None)
        if prepare is not None:
            prepare()


def checkpoint_slots(model: nn.Module) -> dict[str, Slot]:
    """Every checkpoint tensor the model wants, by its full name, in the order of the layers."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if isinstance(module, Loadable):
            parent, dot, leaf = path.rpartition(".")
            slots.update((parent + dot + name, slot) for name, slot in module.slots(leaf))
    return slots


def shard_files(directory: Path) -> list[Path]:
    """The safetensors files to read: the index's, or all there are."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = sorted({str.__str__(file) for file in files})  # TypeError: not a string
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise WeightsError(f"{index} is damaged: no list of weight files can be read from it; "
                               f"fetch it again") from None
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise WeightsError(
                f"{directory} lacks {len(missing)} of {len(names)} weight files, the "
                f"first is {missing[0]!r}: fetch it again"
            )
        return [directory / name for name in names]
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(
            f"{directory} has no *.safetensors file; other weight formats are not read"
        )
    return files


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, lazy tensor) of every tensor in the file."""
    try:
        with safe_open(str(path), framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (no mapping: it has nothing but keys())
                yield name, shard.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is truncated or damaged ({error}): fetch it again") from None


def _is_derived(name: str, tied: bool) -> bool:
    """Tensors that some checkpoints carry although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)
