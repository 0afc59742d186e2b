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
from engine.core.scheduler import Scheduler
from engine.layers.shard import ALONE, Shard
from engine.models.config import ModelConfig, read_model_config
from engine.models.registry import check_split
from engine.parallel import Lead
from engine.runner.engine import Engine
from engine.runner.model_runner import ModelRunner, kv_heads_of, load_model, parse_dtype
from engine.runner.ranks import LeadRunner, LeadScheduler
from engine.runner.sizing import plan_pool
from engine.runner.tokenizer import TextTokenizer, load_tokenizer
from engine.weights.resolve import resolve_model


def build_engine(config: EngineConfig, log: str | Path | IO[str] | EventLog | None,
                 scheduler_options: dict[str, Any]) -> Engine:
    """Load everything. Errors name what is wrong with the model, the settings or the memory.

    `scheduler_options` go to the Scheduler as they are: policy objects, a pool. `log` is a path,
    an open text file, or an EventLog of the caller's own making.
    """
    if config.tensor_parallel_size > 1:
        return _build_parallel(config, log, scheduler_options)
    plan = Plan.make(config, ALONE)
    events = plan.open_log(log)
    scheduler = Scheduler(plan.scheduler, **plan.parts(events, scheduler_options))
    return Engine(scheduler, plan.load(ALONE), plan.tokenizer, events)


def _build_parallel(config: EngineConfig, log: str | Path | IO[str] | EventLog | None,
                    scheduler_options: dict[str, Any]) -> Engine:
    """Rank 0's engine. Its mistakes are found before a worker starts, where that can be."""
    config = replace(config, model=str(resolve_model(config.model)))
    check_split(read_model_config(Path(config.model)), Shard(0, config.tensor_parallel_size))
    lead = Lead(config, scheduler_options)
    try:
        plan = Plan.make(config, lead.shard, lead.minimum)
        events = plan.open_log(log)
        scheduler = LeadScheduler(lead.hub, plan.scheduler,
                                  **plan.parts(events, scheduler_options))
        runner = LeadRunner(plan.load(lead.shard), lead)
        lead.hub.gather("ready")
        return Engine(scheduler, runner, plan.tokenizer, events, lead)
    except BaseException:
        lead.close()
        raise


def build_worker(config: EngineConfig, scheduler_options: dict[str, Any], shard: Shard,
                 minimum: Callable[[int], int]) -> tuple[Scheduler, ModelRunner]:
    """What a rank other than the first needs: no tokenizer, no log."""
    plan = Plan.make(config, shard, minimum)
    return Scheduler(plan.scheduler, **scheduler_options), plan.load(shard)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided before anything large is made; the same on every rank."""

    config: EngineConfig
    directory: Path
    model: ModelConfig
    dtype: torch.dtype
    scheduler: SchedulerConfig
    tokenizer: TextTokenizer | None

    @classmethod
    def make(cls, config: EngineConfig, shard: Shard,
             minimum: Callable[[int], int] = lambda blocks: blocks) -> Plan:
        """Read the model's files but its weights. `minimum` of a number over all ranks."""
        directory = resolve_model(config.model)
        model = read_model_config(directory)
        dtype = parse_dtype(config.dtype, model.dtype)
        mine = replace(model, num_key_value_heads=kv_heads_of(model, shard))
        num_blocks, max_model_len = plan_pool(config, mine, dtype)
        least = minimum(num_blocks)
        if least < num_blocks:
            num_blocks, max_model_len = plan_pool(replace(config, num_kvcache_blocks=least), mine,
                                                  dtype)
        tokenizer = load_tokenizer(directory) if shard.rank == 0 else None
        if not model.eos_token_ids and tokenizer and tokenizer.eos_token_id is not None:
            model = replace(model, eos_token_ids=(tokenizer.eos_token_id,))
        return cls(config, directory, model, dtype,
                   config.scheduler_config(num_blocks, max_model_len), tokenizer)

    def open_log(self, log: str | Path | IO[str] | EventLog | None) -> EventLog | None:
        return _open_log(log, self.scheduler, self.model, self.dtype, self.config.seed)

    def parts(self, events: EventLog | None, options: dict[str, Any]) -> dict[str, Any]:
        """The Scheduler's keywords: the caller's, and where its events go."""
        return {**({} if events is None else {"emit": events.emit}), **options}

    def load(self, shard: Shard) -> ModelRunner:
        """A rank's model with its weights and its cache."""
        config, scheduler = self.config, self.scheduler
        model = load_model(self.model, self.directory, self.dtype, shard=shard,
                           load_format=config.load_format)
        return ModelRunner(
            model, self.model, num_blocks=scheduler.num_blocks,
            block_size=config.kvcache_block_size, max_model_len=scheduler.max_model_len,
            dtype=self.dtype, num_cpu_blocks=scheduler.num_cpu_blocks,
            attention=config.attention_backend, seed=config.seed, shard=shard)


def _open_log(log: str | Path | IO[str] | EventLog | None, scheduler: SchedulerConfig,
              model: ModelConfig, dtype: torch.dtype, seed: int) -> EventLog | None:
    if log is None or isinstance(log, EventLog):
        return log
    try:
        return EventLog(log, log_header(scheduler, model, dtype, seed))
    except OSError as error:
        raise ConfigError(f"cannot write the event log {log}: {error.strerror or error}") from None


def log_header(scheduler: SchedulerConfig, model: ModelConfig, dtype: torch.dtype,
               seed: int) -> dict[str, Any]:
    """Everything a reader of the log needs to know about the run."""
    return {
        "mode": "real",
        "config": asdict(scheduler),
        "model": {**model.to_json(), "dtype": str(dtype).removeprefix("torch.")},
        "hardware": {"device": "cpu", "name": cpu_name(), "threads": torch.get_num_threads(),
                     "cores": os.cpu_count()},
        "versions": library_versions(),
        "seed": seed,
    }


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
