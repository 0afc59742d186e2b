"""cpu_kernels.cpp as functions of tensors. Whether a shape fits is asked once, not each time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from engine.attention.cpu_build import load_library

PANEL = 16  # outputs of a weight matrix that lie side by side
LANES = 8  # numbers the kernels take at a time: every width must be a multiple
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_SIGNATURES: dict[str, list] = {
    "attend": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, *[c_int64] * 5, c_float, c_void_p,
               c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int],
    "rms_norm": [c_void_p, *[c_int64] * 4, *[c_void_p] * 3, c_float, c_void_p, c_int],
    "rotate": [c_void_p, *[c_int64] * 4, c_void_p, c_void_p, c_int],
    "multiply": [c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p, c_void_p, c_int],
    "silu_mul": [c_void_p, c_int64, c_int64, c_void_p, c_int],
}


class Kernels:
    """The kernels for one dtype, a key of DTYPES. Tensors are on the CPU and of that dtype, and
    their last dimension is contiguous. NoKernels if they cannot be had here."""

    def __init__(self, dtype: torch.dtype):
        library = load_library()
        self.attend = _function(library, "attend", dtype)
        self._rms_norm = _function(library, "rms_norm", dtype)
        self._rotate = _function(library, "rotate", dtype)
        self._silu_mul = _function(library, "silu_mul", dtype)
        self._multiply = (_function(library, "multiply", dtype) if dtype == torch.float32 else None)

    @staticmethod
    def fits(width: int) -> bool:
        """True if rows of `width` numbers can be taken whole."""
        return width % LANES == 0

    def pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """`weight` [out, in] as `multiply` reads it, [out / 16, in, 16]; None if it cannot be: the
        product is for float32 and outputs that are a multiple of 16."""
        if self._multiply is None or weight.shape[0] % PANEL:
            return None
        return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()

    def multiply(self, x: torch.Tensor, panels: torch.Tensor,
                 bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b of [rows, in], with W packed: [rows, out]."""
        assert self._multiply is not None
        x = x.contiguous()
        out = torch.empty(x.shape[0], panels.shape[0] * PANEL)
        self._multiply(x.data_ptr(), x.shape[0], x.shape[1], panels.data_ptr(), out.shape[1],
                       None if bias is None else bias.data_ptr(), out.data_ptr(),
                       torch.get_num_threads())
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension of [rows, dim] or [tokens, heads, dim], heads
        side by side; contiguous."""
        out = torch.empty(x.shape, dtype=x.dtype)
        inner = x.shape[1] if x.dim() == 3 else 1
        self._rms_norm(x.data_ptr(), x.shape[0], inner, x.stride(0), x.shape[-1], None, None,
                       weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads())
        return out

    def add_rms_norm(self, x: torch.Tensor, add: torch.Tensor, weight: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + add), x + add) of contiguous [rows, dim]."""
        out, sums = torch.empty_like(x), torch.empty_like(x)
        self._rms_norm(x.data_ptr(), x.shape[0], 1, x.shape[1], x.shape[1], add.data_ptr(),
                       sums.data_ptr(), weight.data_ptr(), eps, out.data_ptr(),
                       torch.get_num_threads())
        return out, sums

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, heads, dim], heads side by side, turned in place; dim / 2 fits. cos and sin
        [tokens, 1, dim] are a RopeTable's."""
        self._rotate(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), x.shape[2],
                     cos.data_ptr(), sin.data_ptr(), torch.get_num_threads())
        return x

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of contiguous [rows, 2 width], gate first: [rows, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        self._silu_mul(gate_up.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())
        return out


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> Callable[..., None]:
    function = library[f"{name}_{DTYPES[dtype]}"]  # a new object each time: its types are ours
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function
