"""Which back ends the conformance suite can run in this process, and on what.

Needs no pytest: a GPU machine without it uses this too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionShape
from tests.attention.cases import CASES, for_pages_of
from tests.attention.flash_standin import FlashAttn2, FlashAttn3
from tests.attention.oracle import Case

HALF = (torch.bfloat16, torch.float16)
SINGLE = (torch.float32,)
DOUBLE = (torch.float64,)


@dataclass(frozen=True)
class Subject:
    """A back end under test. `make` is called with each case's shape."""

    name: str
    make: Callable[[AttentionShape], AttentionBackend]
    dtypes: tuple[torch.dtype, ...]
    device: str = "cpu"
    page: int | None = None  # the cases are stretched to blocks of this many tokens
    small: bool = False  # its tiles are small: the cases with ordinary heads will do

    def cases(self, dtype: torch.dtype) -> list[Case]:
        cases = CASES if self.page is None else for_pages_of(CASES, self.page)
        if self.small:
            cases = [case for case in cases if case.head_dim == 16 and case.kv_heads <= 2]
        few = self.device == "cpu" and dtype in HALF and "triton" in self.name
        return cases[::5] if few else cases  # the interpreter is slow; dtypes differ little there


def _torch(shape: AttentionShape) -> AttentionBackend:
    from engine.attention.torch_sampled import make_torch
    return make_torch(shape)


def _torch_gathered(shape: AttentionShape) -> AttentionBackend:
    """The reference, also where something faster replaces its decodes."""
    from engine.attention.torch_paged import TorchPaged
    return TorchPaged(shape)


def _cpu(shape: AttentionShape) -> AttentionBackend:
    from engine.attention.cpu_paged import CpuPaged
    return CpuPaged(shape)


def _triton(shape: AttentionShape) -> AttentionBackend:
    from engine.attention.triton_paged import TritonPaged
    return TritonPaged(shape)


def _triton_small(shape: AttentionShape) -> AttentionBackend:
    """Tiles of 16 and parts of 16 tokens: short contexts take several of each."""
    from engine.attention.triton_paged import Tiles, TritonPaged
    tiles = Tiles(16, 16, 4, 2)
    return TritonPaged(shape, decode_tiles=tiles, prefill_tiles=tiles, processors=8,
                       shortest_part=16)


def _flash(library):
    def make(shape: AttentionShape) -> AttentionBackend:
        from engine.attention.flash import FlashPaged
        return FlashPaged(shape, library)
    return make


def interpreted() -> bool:
    """Whether Triton's kernels run on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_cpu() -> list[Subject]:
    """What the main test process runs. Triton's interpreter is a switch of the whole process, so a
    process has either this list or interpreted_ones()."""
    from engine.attention import cpu_build
    from engine.attention.flash import Library
    compiled = [Subject("cpu", _cpu, SINGLE + (torch.bfloat16,))]
    return [
        Subject("torch", _torch, DOUBLE + SINGLE + HALF),
        Subject("torch, gathered", _torch_gathered, SINGLE),
        *(compiled if cpu_build.why_not() is None else []),
        Subject("flash 2 stand-in", _flash(Library(2, FlashAttn2)), HALF, page=256),
        Subject("flash 3 stand-in", _flash(Library(3, FlashAttn3)), HALF),
    ]


def interpreted_ones() -> list[Subject]:
    from tests.attention.interpreter import teach_bfloat16
    teach_bfloat16()
    return [Subject("triton", _triton, SINGLE + HALF),
            Subject("triton, small tiles", _triton_small, SINGLE, small=True)]


def on_gpu() -> list[Subject]:
    """Only the libraries that are installed; the caller has a CUDA device."""
    from engine.attention.flash import Library, find_library
    subjects = [
        Subject("torch", _torch, DOUBLE + SINGLE + HALF, "cuda"),
        Subject("triton", _triton, SINGLE + HALF, "cuda"),
        Subject("triton, small tiles", _triton_small, SINGLE + HALF, "cuda", small=True),
    ]
    probe = AttentionShape(2, 2, 64, 256, torch.bfloat16, torch.device("cuda"))
    library = find_library(probe)
    if isinstance(library, Library):
        page = 256 if library.version == 2 else None
        subjects.append(Subject(f"flash {library.version}", _flash(library), HALF, "cuda", page))
    return subjects
