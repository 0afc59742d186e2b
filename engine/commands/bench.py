"""python -m engine bench: nano-vllm's benchmark, whole or scaled down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.benchmark import Figures, Phase, core_ids, measure, set_threads, warm_up
from engine.commands import options as opt
from engine.config import make_config
from engine.core.errors import ConfigError
from engine.llm import LLM
from engine.mistakes import file_sentence
from engine.models.config import read_model_config
from engine.runner.build import cpu_name, library_versions
from engine.runner.sizing import longest_request
from engine.step_profile import StepProfile
from engine.weights.resolve import resolve_model
from engine.workload import Workload, make_workload, parse_range

MIB = 2**20
MOST_SEQS = 10**6
Lengths = Annotated[str, typer.Option(help="tokens, A:B, drawn uniformly")]


def bench_command(
    model: opt.Model = "tiny",
    num_seqs: Annotated[int, typer.Option(help="requests, all there at the start")] = 256,
    input_len: Lengths = "100:1024", output_len: Lengths = "100:1024",
    seed: Annotated[int, typer.Option(help="seed of the workload, and of sampling")] = 0,
    temperature: float = 0.6,
    num_threads: Annotated[int | None, typer.Option(help="threads PyTorch computes with")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="where decode steps spend their time "
                                                            "(CPU)")] = False,
    json_file: Annotated[Path | None, typer.Option(
        "--json", help="write the figures here; - is stdout, with nothing else on it")] = None,
    log: opt.Log = None,
    dtype: opt.Dtype = "auto", load_format: opt.LoadFormat = "auto",
    attention: opt.Attention = "auto", device: opt.Device = "auto",
    enforce_eager: opt.EnforceEager = False, compile: opt.Compile = False,
    overlap: opt.Overlap = None, gpu_memory_utilization: opt.GpuMemory = 0.9,
    tensor_parallel_size: opt.TensorParallel = None, max_model_len: opt.MaxModelLen = None,
    num_kv_blocks: opt.NumKvBlocks = None, block_size: opt.BlockSize = None,
    kv_cache_bytes: opt.KvCacheBytes = None, num_cpu_blocks: opt.NumCpuBlocks = None,
    eviction: opt.Eviction = "lru", enable_prefix_caching: opt.PrefixCaching = True,
    max_num_seqs: opt.MaxNumSeqs = None, max_num_batched_tokens: opt.MaxBatched = None,
    long_prefill_token_threshold: opt.ChunkCap = None, batching: opt.Batching = "mixed",
    order: opt.Order = "fcfs", preemption: opt.Preemption = "recompute",
) -> None:
    """Serve random prompts to random lengths, all at once, and say how long it took."""
    engine = opt.engine_options(locals())
    if not 1 <= num_seqs <= MOST_SEQS:
        raise ConfigError(f"num_seqs={num_seqs} must be at least 1, and at most {MOST_SEQS}: the "
                          f"prompts are made before the first one is served")
    set_threads(num_threads)
    config = read_model_config(resolve_model(model))
    able = longest_request(make_config(model), config)
    limit = f"{config.name} serves {able}:"
    workload = make_workload(
        num_seqs, parse_range(input_len, "input_len"), parse_range(output_len, "output_len"), seed,
        config.vocab_size, lambda tokens: check_length(tokens, able, limit, "at least "))
    check_length(workload.longest, able, limit)
    engine.setdefault("max_model_len", workload.longest)
    with LLM(model, log=log, seed=seed, **engine) as llm:
        able = llm.engine.scheduler.config.max_model_len
        check_length(workload.longest, able,
                     f"max_model_len is {able}: raise --max-model-len, and the pool with it "
                     f"(--num-kv-blocks, --kv-cache-bytes), or")
        warm_up(llm, workload)
        figures = measure(llm, workload, temperature, profile)
        setup = describe(llm, workload, temperature)
    if json_file is not None:
        write_json(json_file, {**setup, **figures.to_json()})
    if json_file != Path("-"):
        show(Console(highlight=False), setup, figures)


def check_length(tokens: int, able: int, limit: str, at_least: str = "") -> None:
    """ConfigError if the workload's longest request, of `tokens`, takes more than `able`. `limit`
    says whose limit that is, and which options raise it, if any do."""
    if able < tokens:
        raise ConfigError(f"the workload's longest request takes {at_least}{tokens} tokens, prompt "
                          f"and output together, and {limit} lower --input-len or --output-len")


def describe(llm: LLM, workload: Workload, temperature: float) -> dict[str, Any]:
    """What was run, and on what."""
    runner, config = llm.engine.runner, llm.engine.scheduler.config
    return {
        "model": llm.config.model, "dtype": str(runner.cache.device_blocks.dtype)[6:],
        "load_format": llm.config.load_format, "attention": runner.attention.name,
        "temperature": temperature, "seed": llm.config.seed, "longest": workload.longest,
        "num_blocks": config.num_blocks, "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "device": str(runner.device), "cpu": cpu_name(), "threads": torch.get_num_threads(),
        "core_ids": core_ids(), "versions": library_versions()}


def write_json(file: Path, values: dict[str, Any]) -> None:
    """One object; ConfigError if the file cannot be written."""
    text = json.dumps(values, indent=2)
    if file == Path("-"):
        typer.echo(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the figures are not written: {file_sentence(error, file)}") from None


def show(console: Console, setup: dict[str, Any], figures: Figures) -> None:
    """The figures as people read them."""
    cores = ",".join(map(str, setup["core_ids"])) or "unknown"
    console.print(f"{escape(setup['model'])}, {setup['dtype']}, {setup['attention']} attention on "
                  f"{setup['device']}, {setup['threads']} threads, cores {cores} ({setup['cpu']})")
    console.print(f"{figures.requests} requests, {figures.input_tokens:,} tokens in, "
                  f"{figures.output_tokens:,} out, temperature {setup['temperature']:g}, "
                  f"seed {setup['seed']}, warm-up excluded")
    console.print(f"[bold]{figures.output_tokens_per_second:,.1f} output tokens/s[/bold], "
                  f"{figures.total_tokens_per_second:,.1f} in all; {figures.wall_seconds:.2f} s, "
                  f"{figures.cpu_seconds:.2f} s of CPU; {figures.preemptions} preemptions")
    table = Table("", "steps", "tokens in", "out", "seconds", "in executor", "tokens/s", box=None)
    for name, phase in (("prefill", figures.prefill), ("decode", figures.decode)):
        table.add_row(name, *_cells(phase))
    console.print(table)
    if figures.profile is not None:
        show_profile(console, figures.profile)
    cuda = figures.peak_cuda_bytes
    console.print(f"peak memory {figures.peak_rss_bytes / MIB:,.0f} MiB resident"
                  + ("" if cuda is None else f", {cuda / MIB:,.0f} MiB of CUDA"))


def show_profile(console: Console, profile: StepProfile) -> None:
    """A decode step by its parts, and how far it is from its matrix products alone."""
    each = 1e3 / profile.steps
    table = Table("decode step", "ms", "share", box=None)
    for part, seconds in profile.parts.items():
        table.add_row(part, f"{seconds * each:.2f}", f"{seconds / profile.seconds:.1%}")
    table.add_row("whole step", f"{profile.seconds * each:.2f}", "100.0%")
    console.print(table)
    console.print(f"{profile.rows / profile.steps:.1f} rows a step; a step takes "
                  f"[bold]{profile.over_products:.2f} x[/bold] the time of its matrix products "
                  f"({profile.layout}); the timers cost about 1 %")
    if profile.onednn_seconds is not None:
        console.print(f"oneDNN's packed products of the same sizes alone take "
                      f"{profile.onednn_seconds * 1e3:.2f} ms, and a step [bold]"
                      f"{profile.over_onednn:.2f} x[/bold] that")


def _cells(phase: Phase) -> list[str]:
    tokens = phase.prompt_tokens + phase.output_tokens
    return [f"{phase.steps:,}", f"{phase.prompt_tokens:,}", f"{phase.output_tokens:,}",
            f"{phase.seconds:.2f}", f"{phase.runner_seconds:.2f}",
            f"{tokens / phase.seconds:,.0f}" if phase.seconds else "-"]
