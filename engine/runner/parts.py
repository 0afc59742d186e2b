"""What a user may hand to the Scheduler, checked before a model is loaded for it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError
from engine.core.eviction import Eviction
from engine.core.policies import Batching, Order, Preemption


def _methods(shape: type) -> tuple[str, ...]:
    return tuple(name for name, value in vars(shape).items()
                 if callable(value) and not name.startswith("_"))


METHODS = {  # what each part must be able to do
    "batching": _methods(Batching), "order": _methods(Order), "preemption": _methods(Preemption),
    "eviction": _methods(Eviction), "pool": ("take", "share", "release"), "emit": ()}


def check_parts(options: Any) -> dict[str, Any]:
    """`scheduler_options` as the Scheduler's keywords; what is None takes its default. ConfigError
    names the option that does not exist, or what its value lacks."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"scheduler_options must be a dict of objects by name "
                          f"({', '.join(METHODS)}), not {_kind(options)}")
    for name, value in options.items():
        if name not in METHODS:
            near = difflib.get_close_matches(str(name), METHODS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METHODS)}"
            raise ConfigError(f"scheduler_options has no {name!r}: {hint}")
        if value is not None:
            _check_part(name, value)
    return {name: value for name, value in options.items() if value is not None}


def _check_part(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ConfigError(f"scheduler_options takes objects: for a policy by its name give LLM "
                          f"{name}={value!r} itself")
    if name == "emit":
        if not callable(value):
            raise ConfigError(f"scheduler_options['emit'] must be a function of (kind, **fields), "
                              f"not {_kind(value)}")
        return
    missing = [method for method in METHODS[name] if not callable(getattr(value, method, None))]
    if missing:
        raise ConfigError(f"scheduler_options[{name!r}] must be an object with "
                          f"{', '.join(f'{method}()' for method in METHODS[name])}, and "
                          f"{_kind(value)} has no {missing[0]}()")
    if isinstance(value, type):
        raise ConfigError(f"scheduler_options[{name!r}] must be an object, and {value.__name__} is "
                          f"a class: give {value.__name__}()")


def _kind(value: Any) -> str:
    """A value by its type, with the value itself where that is short."""
    shown = repr(value)
    kind = type(value).__name__
    return f"{shown} ({kind})" if len(shown) <= 20 else f"one of type {kind}"
