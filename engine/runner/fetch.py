"""Device tensors on their way to the host."""

from __future__ import annotations

from typing import Any

import torch


class Fetch:
    """A copy of some tensors, queued when this is made. `values()` waits for it and for nothing
    that is queued later: the next step may already stand behind it."""

    def __init__(self, *tensors: torch.Tensor):
        self._event: Any = None
        self._host = list(tensors)
        if tensors and tensors[0].device.type == "cuda":
            self._host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                          .copy_(tensor, non_blocking=True) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[Any]:
        """Each tensor as a list of numbers, nested as it has dimensions."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.tolist() for tensor in self._host]
