"""Which attention back end serves a model here: by name, or the best that can."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module

from engine.attention.base import AttentionBackend, AttentionShape
from engine.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a back end lives. Its module has unavailable(shape) unless it runs everywhere."""

    module: str
    maker: str  # its class, or a function that chooses one; called with the shape
    package: str | None = None  # a package that importing the module needs


BACKENDS = {  # best first
    "flash": Entry("engine.attention.flash", "FlashPaged"),
    "triton": Entry("engine.attention.triton_paged", "TritonPaged", "triton"),
    "cpu": Entry("engine.attention.cpu_paged", "CpuPaged"),
    "torch": Entry("engine.attention.torch_sampled", "make_torch"),
}


def availability(shape: AttentionShape) -> dict[str, str | None]:
    """Each known back end, best first, with why it cannot serve `shape` here; None: it can."""
    return {name: _why_not(entry, shape) for name, entry in BACKENDS.items()}


def choose(name: str, shape: AttentionShape) -> str:
    """The back end to use: `name` itself, or for "auto" the best that can serve `shape`.

    ConfigError if the name is unknown, or known but of no use here; the message lists the known
    ones, and for each that cannot serve `shape` here, why.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention back end {name!r} is not known; known: "
                          f"auto, {_describe(availability(shape))}")
    if name != "auto":
        reason = _why_not(BACKENDS[name], shape)
        if reason is not None:
            others = {other: why for other, why in availability(shape).items() if other != name}
            raise ConfigError(f"attention back end {name!r} cannot be used here: {reason}; others: "
                              f"auto, {_describe(others)}")
        return name
    if shape.device.type != "cuda":  # what is made for CUDA could only be interpreted here
        return _choose_on_cpu(shape)
    return next(name for name, reason in availability(shape).items() if reason is None)


def _choose_on_cpu(shape: AttentionShape) -> str:
    """Compiled kernels, or PyTorch alone: with one line if only the machine is in the way."""
    from engine.attention.cpu_paged import unfit
    reason = _why_not(BACKENDS["cpu"], shape)
    if reason is None:
        return "cpu"
    if unfit(shape) is None:
        warnings.warn(f"compiled attention cannot be had here: {reason}; the 'torch' back end "
                      f"computes the same, slower", stacklevel=4)
    return "torch"


def make_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The back end called `name`, or for "auto" the best that can serve `shape` here.

    Raises what choose() raises, and ConfigError if the heads do not divide.
    """
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} K/V "
                          f"heads evenly: num_attention_heads must be a multiple of "
                          f"num_key_value_heads")
    entry = BACKENDS[choose(name, shape)]
    return getattr(import_module(entry.module), entry.maker)(shape)


def _why_not(entry: Entry, shape: AttentionShape) -> str | None:
    try:
        module = import_module(entry.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != entry.package:
            raise
        return f"the package {entry.package} is not installed"
    except ImportError as error:
        return f"{entry.package or entry.module} does not import ({error})"
    check = getattr(module, "unavailable", None)
    return None if check is None else check(shape)


def _describe(reasons: dict[str, str | None]) -> str:
    return ", ".join(name if reason is None else f"{name} (not here: {reason})"
                     for name, reason in reasons.items())
