"""Command-line options that several verbs share, and how they become an LLM's keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

POOL, POLICY, DEVICE = "KV pool", "Scheduling", "Device"

Model = Annotated[str, typer.Option("--model", "-m",
                                    help="tiny, smollm2, a directory, or a hub id")]
Log = Annotated[Path | None, typer.Option(help="write the event log here (.gz compresses it)")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, float64")]
LoadFormat = Annotated[str, typer.Option(help="dummy: random weights, for timing")]
Attention = Annotated[str, typer.Option(help="attention back end")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N", rich_help_panel=DEVICE)]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="no CUDA graphs",
                                            rich_help_panel=DEVICE)]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the layers",
                                       rich_help_panel=DEVICE)]
Overlap = Annotated[bool | None, typer.Option(
    help="start a step while the last one runs; by default on CUDA", rich_help_panel=DEVICE)]
GpuMemory = Annotated[float, typer.Option("--gpu-memory-utilization", rich_help_panel=DEVICE,
                                          help="share of a GPU's memory to use")]
EngineSeed = Annotated[int, typer.Option(help="seed of requests that bring none")]
MaxModelLen = Annotated[int | None, typer.Option(help="longest request, prompt and output")]
NumKvBlocks = Annotated[int | None, typer.Option(help="blocks in the pool", rich_help_panel=POOL)]
BlockSize = Annotated[int | None, typer.Option(help="tokens a block", rich_help_panel=POOL)]
KvCacheBytes = Annotated[int | None, typer.Option(help="pool memory", rich_help_panel=POOL)]
NumCpuBlocks = Annotated[int | None, typer.Option(help="blocks in the swap pool",
                                                  rich_help_panel=POOL)]
PrefixCaching = Annotated[bool, typer.Option(help="share blocks of equal prefixes",
                                             rich_help_panel=POOL)]
Eviction = Annotated[str, typer.Option(help="lru, fifo, clock", rich_help_panel=POOL)]
TensorParallel = Annotated[int | None, typer.Option(
    "--tensor-parallel-size", "-tp", help="processes that share the model")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="requests at once", rich_help_panel=POLICY)]
MaxBatched = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="tokens a step",
                                                rich_help_panel=POLICY)]
ChunkCap = Annotated[int | None, typer.Option("--long-prefill-token-threshold",
                                              help="longest chunk", rich_help_panel=POLICY)]
Batching = Annotated[str, typer.Option(help="mixed, prefill_first, static, reserve",
                                       rich_help_panel=POLICY)]
Order = Annotated[str, typer.Option(help="fcfs, priority, sjf, longest_prefix",
                                    rich_help_panel=POLICY)]
Preemption = Annotated[str, typer.Option(help="recompute, swap", rich_help_panel=POLICY)]

ENGINE_OPTIONS = (
    "dtype", "load_format", "attention", "device", "enforce_eager", "compile", "overlap",
    "gpu_memory_utilization", "max_model_len", "num_kv_blocks", "block_size",
    "kv_cache_bytes", "num_cpu_blocks", "eviction", "max_num_seqs", "max_num_batched_tokens",
    "long_prefill_token_threshold", "tensor_parallel_size", "batching", "order", "preemption",
    "enable_prefix_caching")


def engine_options(values: dict[str, Any]) -> dict[str, Any]:
    """The LLM's keywords among a command's `locals()`; what was not given is left out."""
    return {name: values[name] for name in ENGINE_OPTIONS if values.get(name) is not None}
