"""The options of the commands, one type each, so that two commands spell and explain them alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


Several = list[str] | None  # an option whose value is a list: given twice, it is one longer list


def joined(values: Several) -> str | None:
    """What was given for such an option, as one text; None where nothing was."""
    return ",".join(values) if values else None


Trace = Annotated[Path | None, _option("--trace", "CSV or JSONL trace to take arrivals from")]
Rate = Annotated[float | None, _option("--poisson", "requests a second; inf: all at once")]
Users = Annotated[int | None, _option("--users", "a closed loop of so many users, not a rate")]
Chats = Annotated[float | None, _option("--chats", "chats a second, each re-sends its history")]
Turns = Annotated[int, _option("--turns", "turns of a chat")]
System = Annotated[int, _option("--system-prompt", "tokens all chats begin with")]
Think = Annotated[float, _option("--think", "mean seconds a user thinks between requests")]
Burstiness = Annotated[float, _option("--burstiness", "below 1: burstier than Poisson")]
NumRequests = Annotated[int | None, _option("--num-requests", "how many (a trace: its first ones)")]
InputLen = Annotated[str, _option("--input-len", "prompts: N, A:B, lognormal:MEAN:SIGMA[:MAX], "
                                              "trace:FILE")]
OutputLen = Annotated[str, _option("--output-len", "outputs: the same forms")]
RateScale = Annotated[float, _option("--rate-scale", "a trace at so many times its rate")]
Sample = Annotated[float, _option("--sample", "of a trace: keep this share of its requests")]
Columns = Annotated[Several, _option("--columns", "of a CSV: at=NAME,prompt=NAME,output=NAME")]
SkipBad = Annotated[bool, _option("--skip-bad-rows", "leave out trace rows that are wrong")]
Seed = Annotated[int, _option("--seed", "of all random streams")]

Model = Annotated[str, _option("--model", "known name, directory or config.json")]
Device = Annotated[str, _option("--hardware", "known name or your own file.toml")]
Tp = Annotated[int, _option("--tp", "tensor parallel size")]
Replicas = Annotated[int, _option("--replicas", "engines behind the router")]
RouterName = Annotated[str, _option("--router", "round_robin, least_loaded, power_of_two or "
                                                "longest_prefix")]
Split = Annotated[str | None, _option("--disaggregate", "PREFILL:DECODE replicas instead, such as "
                                                        "2:1; K/V goes over a link")]
KvLink = Annotated[float | None, _option("--kv-link", "GB/s out of a prefill replica; default 50")]
KvLatency = Annotated[float | None, _option("--kv-latency-us", "of one transfer; default 20")]
Eager = Annotated[bool, _option("--enforce-eager", "price kernel launches without graphs")]
Cost = Annotated[Path | None, _option("--cost", "machine file of `calibrate`, instead of a device")]

Batching = Annotated[str | None, _option("--batching", "mixed, prefill_first, static, reserve")]
Order = Annotated[str | None, _option("--order", "fcfs, priority, sjf, longest_prefix")]
Preemption = Annotated[str | None, _option("--preemption", "recompute, swap")]
Eviction = Annotated[str | None, _option("--eviction", "lru, fifo, clock")]
BlockSize = Annotated[int | None, _option("--block-size", "tokens a KV block")]
NumBlocks = Annotated[int | None, _option("--num-blocks", "KV blocks; default: what memory holds")]
CpuBlocks = Annotated[int | None, _option("--num-cpu-blocks", "blocks of the swap pool")]
MaxSeqs = Annotated[int | None, _option("--max-num-seqs", "requests running at once")]
MaxTokens = Annotated[int | None, _option("--max-num-batched-tokens", "token budget of a step")]
MaxLen = Annotated[int | None, _option("--max-model-len", "longest request, prompt and output")]
Caching = Annotated[bool, _option("--prefix-caching/--no-prefix-caching", "share equal prompts")]
ChunkCap = Annotated[int | None, _option("--long-prefill-token-threshold",
                                         "longest chunk of a prompt while others run; 0: no cap")]
Watermark = Annotated[float | None, _option("--watermark", "share of blocks admission leaves free")]
MustFit = Annotated[bool, _option("--full-sequence-must-fit/--no-full-sequence-must-fit",
                                  "admit a prompt only when all of it fits")]
Utilization = Annotated[float | None, _option("--gpu-memory-utilization", "share of memory to use")]

Goodput = Annotated[Several, _option("--goodput", "bounds in ms: ttft:500,tpot:50,e2el:10000")]
ClientMs = Annotated[float, _option("--client-ms", "added to TTFT and E2EL: HTTP, tokenizing")]
Fail = Annotated[Several, _option("--fail", "REPLICA@SECONDS[,…]: replicas that stop")]
MaxQueue = Annotated[int | None, _option("--max-queue", "stop when so many requests wait")]
MaxMinutes = Annotated[float | None, _option("--max-minutes", "stop after so much simulated time")]
Chrome = Annotated[Path | None, _option("--chrome", "write a Chrome trace for Perfetto here")]
Html = Annotated[Path | None, _option("--html", "write a report with charts here")]
Log = Annotated[Path | None, _option("--log", "write the event log here")]
Json = Annotated[Path | None, _option("--json", "write the figures here, with vLLM's keys")]
