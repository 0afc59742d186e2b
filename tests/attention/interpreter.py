"""Triton's interpreter, with the one thing that our kernels need and it lacks."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def teach_bfloat16() -> None:
    """Make tl.dot multiply bfloat16 numbers. NumPy has no such type, so the interpreter keeps their
    bits in uint16, and up to Triton 3.9 multiplies those bits as integers."""
    if getattr(InterpreterBuilder.create_dot, "knows_bfloat16", False):
        return
    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return plain(self, _widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    create_dot.knows_bfloat16 = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_dot = create_dot


def _widened(operand: TensorHandle) -> TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)
