"""Compile our Triton kernels for a GPU that is not here, and read what the compiler reports.

Triton brings its own assembler, so this needs no GPU and no CUDA; nothing is run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_kernels as kernels
from engine.attention.triton_paged import Tiles, choose_decode_tiles, choose_prefill_tiles

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
POINTERS = {"rows": "*i32", "cu_seqlens_q": "*i32", "seqlens_k": "*i32", "tables": "*i32",
            "tile_rows": "*i32", "tile_starts": "*i32", "slots": "*i64", "partial": "*fp32",
            "lse": "*fp32"}
NUMBERS = {"q_stride": "i32", "k_stride": "i32", "v_stride": "i32", "table_stride": "i32",
           "parts": "i32", "scale": "fp32"}
ALIGNED = {*POINTERS, "out", "q", "k", "v", "k_cache", "v_cache", "q_stride", "k_stride",
           "v_stride"}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    shared: int  # bytes of shared memory
    registers: int | None  # a thread; None: no cuobjdump here to ask
    stack: int | None  # bytes a thread, where registers are spilled to


def compile_kernel(kernel, constants: dict, dtype: torch.dtype, capability: int,
                   tiles: Tiles) -> Compiled:
    """Compile `kernel` as the back end would launch it: pointers and strides divisible by 16."""
    names = kernel.arg_names
    signature = {name: POINTERS.get(name) or NUMBERS.get(name) or f"*{NAMES[dtype]}"
                 for name in names}
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(
        fn=kernel, signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]]
               for name in names if name in ALIGNED})
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=tiles.launch)
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, *_usage(compiled.asm["cubin"]))


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    return (int(found[1]), int(found[2])) if found else (None, None)


def decode(dtype: torch.dtype, head_dim: int, block_size: int, group: int, kv_heads: int,
           capability: int, split: bool = True) -> Compiled:
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = choose_decode_tiles(group, block_d, dtype)
    constants = dict(KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
                     BLOCK_M=tiles.block_m, BLOCK_D=block_d, BLOCK_N=tiles.block_n, LEAST_TILES=4,
                     SPLIT=split)
    return compile_kernel(kernels.decode_kernel, constants, dtype, capability, tiles)


def prefill(dtype: torch.dtype, head_dim: int, block_size: int, group: int, kv_heads: int,
            capability: int, pairs: int = 4096) -> Compiled:
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = choose_prefill_tiles(pairs, block_d, dtype)
    constants = dict(KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
                     BLOCK_M=tiles.block_m, BLOCK_D=block_d, BLOCK_N=tiles.block_n)
    return compile_kernel(kernels.prefill_kernel, constants, dtype, capability, tiles)


def reduce(dtype: torch.dtype, head_dim: int, heads: int, capability: int) -> Compiled:
    constants = dict(HEADS=heads, HEAD_DIM=head_dim, BLOCK_N=64, LEAST_TILES=4,
                     BLOCK_D=max(16, triton.next_power_of_2(head_dim)))
    return compile_kernel(kernels.reduce_kernel, constants, dtype, capability, Tiles(1, 64, 1, 3))


def store(dtype: torch.dtype, width: int, capability: int) -> Compiled:
    constants = dict(WIDTH=width, BLOCK=min(1024, triton.next_power_of_2(width)))
    return compile_kernel(kernels.store_kernel, constants, dtype, capability, Tiles(1, 1, 4, 3))
