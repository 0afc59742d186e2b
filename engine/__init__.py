"""Tandem's engine: `from engine import LLM, SamplingParams`. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.request import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM
        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
