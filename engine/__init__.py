"""Tandem's engine: `from engine import LLM, SamplingParams`. Importing it imports nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.request import SamplingParams
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM
        return LLM
    if name == "SamplingParams":
        from engine.core.request import SamplingParams
        return SamplingParams
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
