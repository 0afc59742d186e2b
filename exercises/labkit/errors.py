"""The exceptions that exercises ask a student to raise, where Python has no fitting one."""

from __future__ import annotations


class LabError(Exception):
    """Root of the exceptions that belong to the exercises."""


class OutOfBlocks(LabError):
    """No KV block is free. The pool that raises it has changed nothing."""
