"""Every error the core raises for somebody else's mistake: one sentence, the numbers, the way out.

    TandemError
    ├── ConfigError        a setting that cannot work
    │   └── UnknownPolicy  a policy name nobody registered
    ├── RequestError       a request refused at submit; the engine goes on
    ├── LogError           an event log that cannot be read; carries the line number
    └── CorruptPool        our own bug: an invariant of the pool is broken
"""

from __future__ import annotations


class TandemError(Exception):
    """Root of all errors a user may see. str(error) is one sentence."""


class ConfigError(TandemError):
    """A setting that cannot work."""


class UnknownPolicy(ConfigError):
    """A policy name that is not registered; the message lists the known ones."""


class RequestError(TandemError):
    """A request refused at submit, before it has touched anything."""


class LogError(TandemError):
    """An event log that cannot be read from `line` (1-based) on."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message, line)
        self.line = line

    def __str__(self) -> str:
        return str(self.args[0])


class CorruptPool(TandemError):
    """An invariant of the block pool does not hold; the message names the block and the counts."""
