"""From an EngineConfig to a running Engine, and the log header that describes it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from engine.config import EngineConfig
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.events import EventLog
from engine.core.insight import tee
from engine.core.request import SamplingParams
from engine.core.scheduler import Scheduler
from engine.layers.shard import ALONE, Shard
from engine.mistakes import file_sentence
from engine.models.config import ModelConfig, read_model_config
from engine.models.generation import read_sampling_defaults
from engine.models.registry import check_split
from engine.parallel import Lead
from engine.runner.device import pick_device
from engine.runner.engine import Engine
from engine.runner.graphs import CudaRecorder, why_no_graphs
from engine.runner.heap import keep_freed_memory
from engine.runner.kv_cache import block_bytes
from engine.runner.model_runner import (
    ModelRunner,
    compile_layers,
    kv_heads_of,
    load_model,
    parse_dtype,
)
from engine.runner.parts import check_parts
from engine.runner.pipeline import Pipeline
from engine.runner.profiling import CudaMeter, profile, read_memory
from engine.runner.ranks import LeadRunner, LeadScheduler
from engine.runner.sizing import GpuMemory, check_swap_pool, longest_request, plan_pool
from engine.runner.tokenizer import TextTokenizer, load_tokenizer
from engine.weights.resolve import resolve_model


def build_engine(config: EngineConfig, log: str | Path | IO[str] | EventLog | None,
                 scheduler_options: dict[str, Any]) -> Engine:
    """Load everything. Errors name what is wrong with the model, the settings or the memory.

    `scheduler_options` go to the Scheduler: policy objects, a pool (see check_parts). `log` is a
    path, an open text file, or an EventLog of the caller's own making.
    """
    scheduler_options = check_parts(scheduler_options)
    if config.tensor_parallel_size > 1:
        return _build_parallel(config, log, scheduler_options)
    plan = Plan.make(config, ALONE)
    sized = plan.size()
    events = plan.open_log(log, sized.scheduler)
    scheduler = Scheduler(sized.scheduler, **_parts(events, scheduler_options))
    runner = sized.runner()
    return Engine(scheduler, runner, plan.tokenizer, events,
                  pipeline=Pipeline(runner) if plan.overlaps else None, defaults=plan.defaults)


def _build_parallel(config: EngineConfig, log: str | Path | IO[str] | EventLog | None,
                    scheduler_options: dict[str, Any]) -> Engine:
    """Rank 0's engine. Its mistakes are found before a worker starts, where that can be."""
    config = replace(config, model=str(resolve_model(config.model)))
    check_split(read_model_config(Path(config.model)), Shard(0, config.tensor_parallel_size))
    lead = Lead(config, scheduler_options)
    try:
        plan = Plan.make(config, lead.shard)
        sized = plan.size(lead.minimum)
        events = plan.open_log(log, sized.scheduler)
        scheduler = LeadScheduler(lead.hub, sized.scheduler, **_parts(events, scheduler_options))
        runner = LeadRunner(sized.runner(), lead)
        lead.hub.gather("ready")
        return Engine(scheduler, runner, plan.tokenizer, events, lead,
                      Pipeline(runner) if plan.overlaps else None, plan.defaults)
    except BaseException:
        lead.close()
        raise


def build_worker(config: EngineConfig, scheduler_options: dict[str, Any], shard: Shard,
                 minimum: Callable[[int], int]) -> tuple[Scheduler, ModelRunner]:
    """What a rank other than the first needs: no tokenizer, no log."""
    sized = Plan.make(config, shard).size(minimum)
    return Scheduler(sized.scheduler, **scheduler_options), sized.runner()


def _parts(events: EventLog | None, options: dict[str, Any]) -> dict[str, Any]:
    """The Scheduler's keywords: the caller's, and where its events go; to both, if the caller has
    a place for them beside the log."""
    if events is None:
        return options
    own = options.get("emit")
    return {**options, "emit": events.emit if own is None else tee(events.emit, own)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known before anything large is made; but for the device the same on every rank."""

    config: EngineConfig
    directory: Path
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    shard: Shard
    tokenizer: TextTokenizer | None
    defaults: SamplingParams  # of requests that bring none

    @classmethod
    def make(cls, config: EngineConfig, shard: Shard) -> Plan:
        """Read the model's files but its weights."""
        device = pick_device(config.device, shard)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        directory = resolve_model(config.model)
        model = read_model_config(directory)
        dtype = parse_dtype(config.dtype, model.dtype, device.type)
        tokenizer = load_tokenizer(directory) if shard.rank == 0 else None
        if not model.eos_token_ids and tokenizer and tokenizer.eos_token_id is not None:
            model = replace(model, eos_token_ids=(tokenizer.eos_token_id,))
        return cls(config, directory, model, dtype, device, shard, tokenizer,
                   read_sampling_defaults(directory))

    def size(self, minimum: Callable[[int], int] = lambda blocks: blocks) -> Sized:
        """Decide the pool, the same on every rank: `minimum` of a number over all of them. On a
        GPU this loads the model and does the largest step, unless the config has the size."""
        config, gpu, weights = self.config, None, None
        mine = replace(self.model, num_key_value_heads=kv_heads_of(self.model, self.shard))
        if self.device.type == "cuda":
            weights = self.load_weights()
            gpu = self._measure(weights)
        num_blocks, max_model_len = plan_pool(config, mine, self.dtype, gpu)
        least = minimum(num_blocks)
        if least < num_blocks:
            num_blocks, max_model_len = plan_pool(replace(config, num_kvcache_blocks=least), mine,
                                                  self.dtype, gpu)
        scheduler = config.scheduler_config(num_blocks, max_model_len)
        check_swap_pool(scheduler.num_cpu_blocks, block_bytes(
            mine.num_hidden_layers, config.kvcache_block_size, mine.num_key_value_heads,
            mine.head_dim, self.dtype.itemsize))
        return Sized(self, scheduler, weights)

    def load_weights(self) -> torch.nn.Module:
        return load_model(self.model, self.directory, self.dtype, shard=self.shard,
                          load_format=self.config.load_format, device=self.device)

    def _measure(self, weights: torch.nn.Module) -> GpuMemory:
        config, meter = self.config, CudaMeter(self.device)
        if config.num_kvcache_blocks is not None or config.kv_cache_bytes is not None:
            return read_memory(meter)
        runner = self.make_runner(weights, 1, longest_request(config, self.model))
        return profile(runner, meter, step_tokens=config.max_num_batched_tokens,
                       num_seqs=config.max_num_seqs, graphs=self.records_graphs(runner))

    def make_runner(self, weights: torch.nn.Module, num_blocks: int, max_model_len: int,
                    num_cpu_blocks: int = 0) -> ModelRunner:
        config = self.config
        return ModelRunner(
            weights, self.model, num_blocks=num_blocks, block_size=config.kvcache_block_size,
            max_model_len=max_model_len, dtype=self.dtype, num_cpu_blocks=num_cpu_blocks,
            attention=self.attention, seed=config.seed, shard=self.shard, device=self.device)

    @property
    def attention(self) -> str:
        """The back end to ask for. torch.compile cannot look into the CPU's compiled kernels, which
        do what it would do."""
        backend = self.config.attention_backend
        if not self.config.compile or self.device.type != "cpu":
            return backend
        if backend == "cpu":
            raise ConfigError("torch.compile cannot trace the kernels of attention back end 'cpu': "
                              "leave out compile, or take attention='torch'")
        return "torch" if backend == "auto" else backend

    @property
    def overlaps(self) -> bool:
        overlap = self.config.overlap
        return self.device.type == "cuda" if overlap is None else overlap

    def records_graphs(self, runner: ModelRunner) -> bool:
        return (self.device.type == "cuda" and not self.config.enforce_eager
                and why_no_graphs(runner.attention, runner.model) is None)

    def open_log(self, log: str | Path | IO[str] | EventLog | None,
                 scheduler: SchedulerConfig) -> EventLog | None:
        return _open_log(log, log_header(scheduler, self.model, self.dtype, self.config.seed,
                                         self.hardware))

    @property
    def hardware(self) -> dict[str, Any]:
        """What computes, and how the model lies on it: what the simulator prices the log's steps
        by."""
        graphs = {"graphs": not self.config.enforce_eager} if self.device.type == "cuda" else {}
        return hardware(self.device) | {"tp": self.shard.size} | graphs


@dataclass(frozen=True, slots=True)
class Sized:
    """A plan whose pool is decided; `weights` if they had to be loaded for that."""

    plan: Plan
    scheduler: SchedulerConfig
    weights: torch.nn.Module | None

    def runner(self) -> ModelRunner:
        """This rank's model with its weights, its cache, and its graphs."""
        plan, scheduler = self.plan, self.scheduler
        weights = self.weights if self.weights is not None else plan.load_weights()
        runner = plan.make_runner(weights, scheduler.num_blocks, scheduler.max_model_len,
                                  scheduler.num_cpu_blocks)
        runner.shares_tokens = plan.overlaps and plan.shard.size > 1
        if plan.config.compile:
            compile_layers(weights)
        if plan.records_graphs(runner):
            runner.record_graphs(scheduler.max_num_seqs, CudaRecorder())
        if plan.device.type == "cpu":
            keep_freed_memory()
        return runner


def _open_log(log: str | Path | IO[str] | EventLog | None,
              header: dict[str, Any]) -> EventLog | None:
    if log is None or isinstance(log, EventLog):
        return log
    try:
        return EventLog(log, header)
    except OSError as error:
        raise ConfigError(f"no event log is written: {file_sentence(error, str(log))}") from None


def log_header(scheduler: SchedulerConfig, model: ModelConfig, dtype: torch.dtype,
               seed: int, hardware: dict[str, Any]) -> dict[str, Any]:
    """Everything a reader of the log needs to know about the run."""
    return {
        "mode": "real",
        "config": asdict(scheduler),
        "model": {**model.to_json(), "dtype": str(dtype).removeprefix("torch.")},
        "hardware": hardware,
        "versions": library_versions(),
        "seed": seed,
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """What computes, for logs and figures."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"device": str(device), "name": found.name, "memory": found.total_memory}
    return {"device": "cpu", "name": cpu_name(), "threads": torch.get_num_threads(),
            "cores": os.cpu_count()}


def cpu_name() -> str:
    """The processor's marketing name, as well as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def library_versions() -> dict[str, str]:
    import numpy
    import safetensors
    return {"python": platform.python_version(), "torch": torch.__version__,
            "numpy": numpy.__version__, "safetensors": safetensors.__version__}
