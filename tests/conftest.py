"""What every test shares: one thread a process, and skips that say why."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# Before torch is imported anywhere: with several processes on few cores, more threads than cores
# make CPU torch many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("TANDEM_TRACES", ROOT.parent / "shared" / "traces"))


def chromium() -> str | None:
    """Path of a Chromium to drive, or None."""
    return os.environ.get("TANDEM_CHROMIUM") or shutil.which("chromium")


def _no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device here"


def _no_browser() -> str | None:
    return None if chromium() else "no Chromium here (Debian: apt-get install chromium)"


def _no_real_model() -> str | None:
    from engine.weights.pull import cached_path
    if cached_path("smollm2") is None:
        return "SmolLM2 is not here: python -m engine pull smollm2"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    for name, why in (("gpu", _no_gpu), ("browser", _no_browser), ("real_model", _no_real_model)):
        if any(item.get_closest_marker(name) for item in items):
            reasons[name] = why()
    for item in items:
        for name, reason in reasons.items():
            if reason is not None and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that fails on random numbers fails again when it is run again."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def traces() -> Path:
    """The folder of public traces; the test is skipped where it is missing."""
    if not TRACES.is_dir():
        pytest.skip(f"no traces at {TRACES}: set TANDEM_TRACES to a folder that has them")
    return TRACES
