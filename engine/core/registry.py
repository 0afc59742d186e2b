"""Names for small strategy classes: chosen by name in a config, or passed as an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from engine.core.errors import UnknownPolicy

T = TypeVar("T")


class Registry(Generic[T]):
    """Name -> class of one kind of policy."""

    def __init__(self, kind: str):
        self.kind = kind
        self._classes: dict[str, Callable[[], T]] = {}

    def register(self, name: str) -> Callable[[type], type]:
        """Class decorator; also sets the class's `name`."""
        def add(cls: type) -> type:
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls
        return add

    def names(self) -> list[str]:
        return list(self._classes)

    def make(self, name: str) -> T:
        """A fresh policy object. UnknownPolicy, listing the known names, for any other name."""
        if name not in self._classes:
            known = ", ".join(self._classes)
            raise UnknownPolicy(f"{self.kind} policy {name!r} does not exist; known: {known}")
        return self._classes[name]()
