"""python -m engine memory: what a model takes, and what fits beside it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from engine.commands import options as opt
from engine.config import make_config
from engine.core.errors import ConfigError
from engine.footprint import Footprint, parse_size, plan_footprint, size_text
from engine.layers.shard import ALONE
from engine.models.config import ModelConfig, read_model_config
from engine.models.fields import LONGEST
from engine.models.registry import build_model
from engine.runner.device import pick_device
from engine.runner.model_runner import parse_dtype
from engine.runner.sizing import free_memory, longest_request
from engine.weights.errors import WeightsError
from engine.weights.loader import check_weights
from engine.weights.resolve import resolve_model


def memory_command(
    model: opt.Model = "tiny", dtype: opt.Dtype = "auto",
    budget: Annotated[str | None, typer.Option(
        help="memory for everything, such as 8GiB; by default what this machine has free")] = None,
    request_tokens: Annotated[int | None, typer.Option(
        help="prompt and output of the requests to count; by default the model's longest")] = None,
    block_size: Annotated[int, typer.Option(help="tokens a block")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="tokens a step")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="requests at once")] = 128,
    graphs: Annotated[bool | None, typer.Option(
        help="decodes recorded as CUDA graphs; by default if a GPU is here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what weights, activations, CUDA graphs and KV cache take, and how many requests fit."""
    directory = resolve_model(model)
    config = read_model_config(directory)
    able = longest_request(make_config(model), config)
    longest = able if request_tokens is None else request_tokens
    for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs),
                        ("max_num_batched_tokens", max_num_batched_tokens),
                        ("request_tokens", longest)):
        if not 1 <= value <= LONGEST:
            shown = str(value) if value < LONGEST**2 else "..."
            raise ConfigError(f"{name}={shown} must be at least 1 and at most {LONGEST}")
    if longest > able:
        raise ConfigError(f"request_tokens={longest} is more than the {able} tokens that "
                          f"{config.name} serves: count requests of at most {able}")
    device = pick_device("auto", ALONE).type
    chosen = parse_dtype(dtype, config.dtype, device)
    plan = plan_footprint(
        config, chosen, budget=free_here() if budget is None else parse_size(budget),
        block_size=block_size,
        step_tokens=max_num_batched_tokens, num_seqs=max_num_seqs, request_tokens=longest,
        graphs=torch.cuda.is_available() if graphs is None else graphs)
    if as_json:
        typer.echo(json.dumps(plan.to_json(), indent=2))
    else:
        show(Console(highlight=False), plan, config, str(chosen)[6:], max_num_seqs)
    warn_of_damage(config, directory, chosen)


def warn_of_damage(config: ModelConfig, directory: Path, dtype: torch.dtype) -> None:
    """The sum needs config.json alone, but whoever plans with it wants to load the weights. A
    directory without any is no mistake: they may be fetched later."""
    try:
        if any(directory.glob("*.safetensors*")):
            with torch.device("meta"):
                check_weights(build_model(config, ALONE, dtype), directory)
    except WeightsError as error:
        warnings.warn(f"{error}; the sum above goes by config.json alone", stacklevel=2)


def free_here() -> int:
    """Bytes that the first GPU has free, or this machine where there is none."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory()


def show(console: Console, plan: Footprint, config: ModelConfig, dtype: str, at_once: int) -> None:
    """The arithmetic, line by line."""
    table = Table("", Column("bytes", justify="right"), "", box=None, show_header=False)

    def line(what: str, size: int, how: str = "") -> None:
        table.add_row(what, f"{size:,}", f"{size_text(size)}  {how}".rstrip())

    line("budget", plan.budget)
    line("- weights", plan.total_weights, ", ".join(
        f"{part} {size_text(size)}" for part, size in plan.weights.items() if size))
    line("- activations", plan.activations, "estimated, one full step")
    if plan.graphs:
        line("- graphs", plan.graphs, "estimated, the largest recorded decode")
    line("= for KV", plan.kv_budget)
    line("KV a token", plan.kv_per_token,
         f"2 x {config.num_hidden_layers} layers x {config.num_key_value_heads} heads x "
         f"{config.head_dim}, {dtype}")
    line("KV a block", plan.kv_per_block, f"{plan.block_size} tokens")
    console.print(table)
    each = -(-plan.request_tokens // plan.block_size)
    console.print(
        f"{plan.blocks:,} blocks fit, and the padding block: {plan.blocks * plan.block_size:,} "
        f"tokens, or [bold]{plan.requests:,} at once of requests of {plan.request_tokens:,} "
        f"tokens[/bold] ({each:,} blocks each)"
        + (f"; max_num_seqs={at_once:,} lets {at_once:,} of them run" if at_once < plan.requests
           else ""))
