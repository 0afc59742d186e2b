"""How many replicas prefill and how many decode, and the link between: checked when described."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.core.params import is_number, is_whole, shown
from simulator.errors import WorkloadError
from simulator.plain import plain

KV_LINK = 50.0  # 10^9 bytes a second: a 400 Gbit/s network card, one direction
KV_LATENCY_US = 20.0  # assumption: setting up one RDMA transfer; what matters is bytes / KV_LINK


@dataclass(frozen=True, slots=True)
class Split:
    """How many replicas do what, and the link out of each prefill replica. WorkloadError unless all
    of it can be."""

    prefill: int
    decode: int
    bandwidth: float = KV_LINK  # 10^9 bytes a second
    latency: float = KV_LATENCY_US * 1e-6  # seconds a transfer, beside its bytes

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, plain(getattr(self, name)))
        for number in (self.prefill, self.decode):
            if not is_whole(number):
                raise WorkloadError(f"a split has {shown(number)} replicas of a kind, must be a "
                                    f"whole number")
        for name, value in (("bandwidth", self.bandwidth), ("latency", self.latency)):
            if not is_number(value):
                raise WorkloadError(f"the KV link's {name} is {shown(value)}, must be a number")
        if self.prefill < 1 or self.decode < 1:
            raise WorkloadError(f"--disaggregate {self.prefill}:{self.decode}: both prefill and "
                                f"decode need at least 1 replica")
        if not 0 < self.bandwidth <= math.inf or not 0 <= self.latency < math.inf:
            raise WorkloadError(f"the KV link has {self.bandwidth:g} GB/s and {self.latency:g} s: "
                                f"the bandwidth must be above 0, the latency at least 0")

    @property
    def replicas(self) -> int:
        return self.prefill + self.decode


def parse_split(text: str | None, bandwidth: float | None = None,
                latency_us: float | None = None) -> Split | None:
    """`2:1` → 2 prefill replicas, 1 decode replica. WorkloadError if it has another form, or if a
    link is given for nothing."""
    if not text:
        if bandwidth is not None or latency_us is not None:
            raise WorkloadError("--kv-link and --kv-latency-us are for --disaggregate P:D")
        return None
    prefill, _, decode = text.partition(":")
    if not prefill.strip().isdecimal() or not decode.strip().isdecimal():
        raise WorkloadError(f"--disaggregate {text!r} is not of the form PREFILL:DECODE, the "
                            f"numbers of replicas, such as 2:1")
    return Split(int(prefill), int(decode), KV_LINK if bandwidth is None else bandwidth,
                 (KV_LATENCY_US if latency_us is None else latency_us) * 1e-6)
