"""python -m engine generate: prompts in, text out, streaming."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.commands import options as opt
from engine.core.errors import ConfigError, RequestError
from engine.core.request import SamplingParams
from engine.llm import LLM
from engine.mistakes import read_text
from engine.outputs import Delta
from engine.prompts import Prompt, PromptError

Number = Annotated[float | None, typer.Option(show_default="the model's own")]
Count = Annotated[int | None, typer.Option(show_default="the model's own")]
Samples = Annotated[int, typer.Option("--n", "-n", help="samples a prompt")]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="may be repeated")]


def generate_command(
    model: opt.Model = "tiny",
    prompt: Prompts = None,
    prompts_file: Annotated[Path | None, typer.Option(help="a prompt a line")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="wrap prompts in the chat template")] = False,
    max_tokens: Annotated[int | None, typer.Option(show_default="64")] = None,
    temperature: Number = None, top_k: Count = None, top_p: Number = None,
    min_p: Number = None, repetition_penalty: Number = None, n: Samples = 1,
    stop: Annotated[list[str] | None, typer.Option(help="stop string; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    seed: opt.EngineSeed = 0,
    log: opt.Log = None,
    dtype: opt.Dtype = "auto", load_format: opt.LoadFormat = "auto",
    attention: opt.Attention = "auto", device: opt.Device = "auto",
    enforce_eager: opt.EnforceEager = False, overlap: opt.Overlap = None,
    gpu_memory_utilization: opt.GpuMemory = 0.9,
    max_model_len: opt.MaxModelLen = None,
    num_kv_blocks: opt.NumKvBlocks = None, block_size: opt.BlockSize = None,
    kv_cache_bytes: opt.KvCacheBytes = None, num_cpu_blocks: opt.NumCpuBlocks = None,
    eviction: opt.Eviction = "lru", enable_prefix_caching: opt.PrefixCaching = True,
    tensor_parallel_size: opt.TensorParallel = None,
    max_num_seqs: opt.MaxNumSeqs = None, max_num_batched_tokens: opt.MaxBatched = None,
    long_prefill_token_threshold: opt.ChunkCap = None,
    batching: opt.Batching = "mixed", order: opt.Order = "fcfs",
    preemption: opt.Preemption = "recompute",
) -> None:
    """Generate text for one prompt, streamed, or for many, together.

    Status 0 if every request was served to its end; 1 if one failed on the way.
    """
    engine = opt.engine_options(locals())
    sources = read_prompts(prompt or [], prompts_file)
    texts = [source.text for source in sources]
    given: dict[str, Any] = {
        "max_tokens": 64 if max_tokens is None else max_tokens, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "n": n,
        "stop": tuple(stop) if stop else None, "ignore_eos": ignore_eos}
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**given)  # a mistake shows before a model is loaded
    with LLM(model, log=log, seed=seed, **engine) as llm:
        params = replace(llm.get_default_sampling_params(), **given)
        check_reach(max_tokens, llm.engine.scheduler.config.max_model_len)
        prompts: list[Prompt] = list(texts)
        try:
            if chat:
                prompts = llm.render_chat([[{"role": "user", "content": text}] for text in texts])
            if len(prompts) == 1 and n == 1:
                stream_one(llm, prompts[0], params)
            else:
                run_many(llm, texts, prompts, params)
        except PromptError as error:
            where = sources[error.index].where
            raise RequestError(f"{where}: {error.reason}" if where else error.reason) from None


class Source(NamedTuple):
    """A prompt, and where the user finds it; "" where there is but one."""

    text: str
    where: str


def check_reach(max_tokens: int | None, longest: int) -> None:
    """One line if no prompt is short enough for the asked `max_tokens`; it is served all the same,
    up to `longest` tokens, as people know it from vLLM."""
    if max_tokens is not None and max_tokens >= longest:
        warnings.warn(f"max_tokens={max_tokens} cannot be reached: requests end at "
                      f"max_model_len={longest} tokens, prompt and output together", stacklevel=2)


def read_prompts(prompts: list[str], file: Path | None) -> list[Source]:
    """All prompts of the command line. ConfigError if there is none or the file cannot be read."""
    sources = [Source(text, f"--prompt number {number}" if len(prompts) > 1 or file else "")
               for number, text in enumerate(prompts, start=1)]
    if file is not None:
        lines = read_text(file, "a text file with one prompt a line", ConfigError).split("\n")
        sources += [Source(line, f"{file}, line {number}")
                    for number, line in enumerate(lines, start=1) if line.strip()]
    if not sources:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts-file FILE")
    return sources


def stream_one(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Print the text as it comes; a line of numbers goes to stderr at the end."""
    console, clock = Console(stderr=True, highlight=False), llm.engine.clock
    started, first, tokens, reason, failed = clock(), 0.0, 0, "Ctrl-C", False
    for delta in _until_interrupted(llm.stream(prompt, params)):
        if delta is None:
            break
        tokens += len(delta.token_ids)
        first = first or clock()
        reason = delta.finish_reason or reason
        typer.echo(delta.text, nl=False)
        if delta.error:
            failed = True
            console.print(f"\n{delta.error}", style="red", markup=False)
    typer.echo()
    seconds = clock() - started
    wait = first - started if first else seconds
    pace = max(tokens - 1, 0) / max(seconds - wait, 1e-9)
    after = f", then {pace:.1f} tokens/s" if tokens > 1 else ""
    count = f"{tokens} token" + "s" * (tokens != 1)
    console.print(f"[dim]{count}, finished by {reason}; first after {wait:.3f} s{after}[/dim]")
    if reason == "Ctrl-C":
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def run_many(llm: LLM, texts: list[str], prompts: list[Prompt], params: SamplingParams) -> None:
    """Run together under a progress bar, then print each text under its prompt."""
    console = Console(stderr=True, highlight=False)
    total, started, tokens = len(prompts) * params.n, llm.engine.clock(), 0
    parts: dict[tuple[str, int], list[str]] = {}
    errors: dict[tuple[str, int], str] = {}
    interrupted, deltas = False, llm.stream(prompts, params)  # refuses before a bar is drawn
    with Progress(TextColumn("[progress.description]{task.description}"), BarColumn(),
                  MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("generating", total=total)
        for delta in _until_interrupted(deltas):
            if delta is None:
                interrupted = True
                break
            key = (delta.request_id, delta.index)
            parts.setdefault(key, []).append(delta.text)
            tokens += len(delta.token_ids)
            if delta.error:
                errors[key] = delta.error
            if delta.finish_reason:
                seconds = max(llm.engine.clock() - started, 1e-9)
                progress.update(task, advance=1, description=f"{tokens / seconds:.0f} tokens/s")
    ids = sorted({name for name, _ in parts}, key=lambda name: int(name[1:]))
    for name in ids:  # r0, r1, … in the order of the prompts; not all after an interruption
        typer.secho(f"> {texts[int(name[1:])]}", bold=True)
        for key in sorted(key for key in parts if key[0] == name):
            typer.echo("".join(parts[key]) if key not in errors else f"error: {errors[key]}")
    seconds = llm.engine.clock() - started
    console.print(f"[dim]{total} samples, {tokens} tokens in {seconds:.2f} s: "
                  f"{tokens / seconds:.1f} tokens/s[/dim]")
    if interrupted:
        console.print("interrupted: the texts above are what there was")
        raise typer.Exit(130)
    if errors:
        console.print(f"{len(errors)} of {total} samples failed", style="red")
        raise typer.Exit(1)


def _until_interrupted(deltas: Iterator[Delta]) -> Iterator[Delta | None]:
    """The deltas; None as the last one if Ctrl-C ended them, so that no finished text is lost."""
    try:
        yield from deltas
    except KeyboardInterrupt:
        yield None
