"""Paged attention: one module a back end, one interface, chosen by name or by what is possible."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionShape, StepInputs
from engine.attention.select import BACKENDS, make_backend

__all__ = ["BACKENDS", "AttentionBackend", "AttentionShape", "StepInputs", "make_backend"]
