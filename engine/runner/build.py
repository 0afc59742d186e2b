"""From an EngineConfig to a running Engine, and the log header that describes it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from engine.config import EngineConfig
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.events import EventLog
from engine.core.scheduler import Scheduler
from engine.models.config import ModelConfig, read_model_config
from engine.runner.engine import Engine
from engine.runner.model_runner import ModelRunner, load_model, parse_dtype
from engine.runner.sizing import plan_pool
from engine.runner.tokenizer import load_tokenizer
from engine.weights.resolve import resolve_model


def build_engine(config: EngineConfig, log: str | Path | IO[str] | EventLog | None,
                 scheduler_options: dict[str, Any]) -> Engine:
    """Load everything. Errors name what is wrong with the model, the settings or the memory.

    `scheduler_options` go to the Scheduler as they are: policy objects, a pool. `log` is a path,
    an open text file, or an EventLog of the caller's own making.
    """
    directory = resolve_model(config.model)
    model_config = read_model_config(directory)
    dtype = parse_dtype(config.dtype, model_config.dtype)
    num_blocks, max_model_len = plan_pool(config, model_config, dtype)
    scheduler_config = config.scheduler_config(num_blocks, max_model_len)
    tokenizer = load_tokenizer(directory)
    if not model_config.eos_token_ids and tokenizer and tokenizer.eos_token_id is not None:
        model_config = replace(model_config, eos_token_ids=(tokenizer.eos_token_id,))
    events = _open_log(log, scheduler_config, model_config, dtype, config.seed)
    options = {**({} if events is None else {"emit": events.emit}), **scheduler_options}
    scheduler = Scheduler(scheduler_config, **options)
    model = load_model(model_config, directory, dtype, load_format=config.load_format)
    runner = ModelRunner(
        model, model_config, num_blocks=num_blocks, block_size=config.kvcache_block_size,
        max_model_len=max_model_len, dtype=dtype, num_cpu_blocks=scheduler_config.num_cpu_blocks,
        attention=config.attention_backend, seed=config.seed)
    return Engine(scheduler, runner, tokenizer, events)


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
