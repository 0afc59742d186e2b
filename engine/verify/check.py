"""One verification: prompts that touch every border, a reference, an engine, a report."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.config import make_config
from engine.core.errors import ConfigError
from engine.core.request import Request, SamplingParams
from engine.layers.shard import ALONE
from engine.llm import LLM
from engine.models.config import read_model_config
from engine.models.registry import build_model
from engine.parallel import under_torchrun
from engine.runner.graphs import EagerRecorder
from engine.runner.sizing import longest_request
from engine.verify.faults import check_fault, plant
from engine.verify.probe import Divergence, NearTie, Probe
from engine.verify.reference import Reference, VerifyError
from engine.weights.loader import check_weights
from engine.weights.resolve import resolve_model

# Relative to the largest value of a row. transformers normalises in float32 whatever the dtype,
# so float64 is not much stricter for it; with float32 the error of every layer adds up.
TOLERANCES = {"float32": 3e-4, "float64": 3e-5}


@dataclass(frozen=True, slots=True)
class Report:
    """What was compared, and the first thing that differed."""

    model: str
    dtype: str
    tolerance: float
    prompts: list[int]  # their lengths
    outputs: int  # tokens each
    steps: int
    values: int  # compared
    worst: dict[str, float]  # largest relative error by kind of operation
    first: Divergence | None
    near_ties: list[NearTie]
    fault: str | None = None
    place: str | None = None  # where the fault must be found

    @property
    def good(self) -> bool:
        """Nothing differs; or, with a fault planted, it was found in its place."""
        if self.fault is None:
            return self.first is None
        return self.first is not None and self.first.op == self.place

    def to_json(self) -> dict[str, Any]:
        return {"good": self.good, **asdict(self)}


def verify(model: str, *, num_prompts: int = 6, num_outputs: int = 10, seed: int = 0,
           dtype: str = "float32", block_size: int = 4, attention: str = "auto",
           fault: str | None = None) -> Report:
    """Compare the engine with transformers, or find a planted fault.

    Prompts come in chunks, two of them share a prefix, decodes cross block borders and run as CUDA
    graphs do: over static buffers, with padding rows. Stops after
    the first step that diverges. ConfigError, WeightsError or VerifyError if there is nothing to
    compare.
    """
    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype={dtype!r} is too coarse to tell faults from rounding; verify in "
                          f"{' or '.join(TOLERANCES)}")
    for name, value in (("prompts", num_prompts), ("output_len", num_outputs),
                        ("block_size", block_size)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if under_torchrun():
        raise ConfigError("verify compares in one process: start it without torchrun")
    directory = resolve_model(model)
    config = read_model_config(directory)
    lengths = prompt_lengths(range(max(num_prompts - 3, 0), num_prompts), block_size)
    longest = max(lengths) + num_outputs
    able = longest_request(make_config(model), config)
    if longest > able:
        raise ConfigError(f"prompts={num_prompts}, block_size={block_size} and output_len="
                          f"{num_outputs} make requests of up to {longest} tokens, and "
                          f"{config.name} serves {able}: lower one of them")
    if fault is not None:
        check_fault(fault, prompt_lengths(range(num_prompts), block_size), num_outputs, block_size)
    with torch.device("meta"):
        check_weights(build_model(config, ALONE, getattr(torch, dtype)), directory)
    prompts = make_prompts(num_prompts, block_size, config.vocab_size, seed)
    reference = Reference(directory, getattr(torch, dtype), prompts, num_outputs)
    with LLM(model, dtype=dtype, attention=attention, block_size=block_size, max_model_len=longest,
             num_kv_blocks=num_prompts * -(-longest // block_size) + 1,
             max_num_batched_tokens=max(longest, 6 * block_size), enforce_eager=True,
             long_prefill_token_threshold=3 * block_size, overlap=False) as llm:
        # Decodes go over a graph's static buffers, replayed eagerly: a real graph shows nobody
        # what is computed in it.
        llm.engine.runner.record_graphs(num_prompts, EagerRecorder())
        blocks = llm.engine.runner.cache.device_blocks
        blocks[:, :, :llm.engine.scheduler.config.num_blocks] = float("nan")  # unwritten slots show
        place = None if fault is None else plant(llm.engine, fault)
        probe = Probe(llm.engine, reference, TOLERANCES[dtype])
        run(llm, probe, prompts, num_outputs)
    return Report(config.name, dtype, TOLERANCES[dtype], [len(p) for p in prompts], num_outputs,
                  probe.steps, probe.compared, probe.worst, probe.first, probe.near_ties, fault,
                  place)


def make_prompts(number: int, block_size: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts around the borders of blocks; every second one shares a block with the one
    before, if both have one."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(number):
        length, = prompt_lengths([index], block_size)
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        if index % 2 and length > block_size < len(prompts[-1]):
            prompt[:block_size] = prompts[-1][:block_size]
        prompts.append(prompt)
    return prompts


def prompt_lengths(indices: Iterable[int], block_size: int) -> list[int]:
    """Tokens of these prompts: one less than a block, a block, one more, then two blocks on."""
    return [max(index // 3 * 2 * block_size + index % 3 - 1 + block_size, 1) for index in indices]


def run(llm: LLM, probe: Probe, prompts: list[list[int]], num_outputs: int) -> None:
    """Serve the prompts until they are done or something diverged."""
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    sessions = [llm.engine.submit(Request(str(index), prompt, params))
                for index, prompt in enumerate(prompts)]
    while probe.first is None and llm.engine.step():
        pass
    failed = next((s.request for s in sessions if s.request.error), None)
    if failed is not None and probe.first is None:
        raise VerifyError(f"prompt {failed.id} ended before anything diverged: {failed.error}")
