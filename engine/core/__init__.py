"""The core: requests, blocks, scheduling, and the event log. Standard library only."""

from engine.core.batch import Batch, Row, RowFailed
from engine.core.block_manager import BlockManager
from engine.core.block_pool import BlockPool
from engine.core.config import SchedulerConfig
from engine.core.errors import (
    ConfigError,
    CorruptPool,
    LogError,
    RequestError,
    TandemError,
    UnknownPolicy,
)
from engine.core.request import Request, RequestStatus, SamplingParams
from engine.core.scheduler import Scheduler

__all__ = [
    "Batch", "BlockManager", "BlockPool", "ConfigError", "CorruptPool", "LogError", "Request",
    "RequestError", "RequestStatus", "Row", "RowFailed", "SamplingParams", "Scheduler",
    "SchedulerConfig", "TandemError", "UnknownPolicy",
]
