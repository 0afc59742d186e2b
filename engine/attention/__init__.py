"""Paged attention: one module a back end, one interface, chosen by name or by what is possible."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionShape, StepInputs
from engine.core.errors import ConfigError

BACKENDS = ("torch",)

__all__ = ["BACKENDS", "AttentionBackend", "AttentionShape", "StepInputs", "make_backend"]


def make_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The back end called `name`; "auto" takes the best that works here.

    ConfigError lists the known names.
    """
    if name in ("auto", "torch"):
        from engine.attention.torch_paged import TorchPaged
        return TorchPaged(shape)
    raise ConfigError(f"attention back end {name!r} is not known; "
                      f"known: auto, {', '.join(BACKENDS)}")
