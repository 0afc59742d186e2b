"""Devices: datasheet rates, the efficiencies that correct them, and how many KV blocks fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulator.errors import SpecError, unknown
from simulator.modelspec import ModelSpec
from simulator.tables import Range, number, packaged, read_toml, subtable

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What kernels reach of a datasheet. Every field and its source: `data/hardware.toml`."""

    gemm_flops: float
    gemm_bandwidth: float
    prefill_flops: float
    decode_bandwidth: float
    prefill_bandwidth: float
    elementwise: float
    p_norm: float  # 1 … inf
    layer_us: float
    step_us: float
    decode_seq_us: float
    sampled_seq_us: float
    kernels_per_layer: float
    launch_us: float
    allreduce_us_nvlink: float
    allreduce_us_pcie: float
    pcie: float
    graph_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, and the link to its tensor-parallel neighbours."""

    name: str
    tflops: float  # dense bf16, 10^12 a second
    bandwidth: float  # device memory, 10^9 bytes a second
    memory: float  # usable GiB
    link: float  # 10^9 bytes a second, one direction, between ranks
    pcie: float  # 10^9 bytes a second, one direction, device to host
    link_kind: str  # "nvlink" | "pcie"
    utilization: float  # share of memory the engine may use
    reserve_gib: float  # of that, activations, graphs and context
    efficiency: Efficiency

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a log header."""
        return asdict(self)


# What a device can be: from a microcontroller to a wafer. Beyond that a value is a slip of the pen,
# and prices of 0 or infinite seconds would follow.
RATES = {"tflops": Range(0.001, 1e6), "bandwidth": Range(0.01, 1e8), "memory": Range(0.01, 10_000),
         "link": Range(0.001, 1e6), "pcie": Range(0.001, 1e6)}
_MEMORY = {"utilization": Range(0.01, 1), "reserve_gib": Range(0, 10_000)}
_SHARE = Range(0.001, 2)  # of a datasheet: clocks boost, and caches beat device memory
_MICROSECONDS = Range(0, 1e6)
_EFFICIENCY = {
    "gemm_flops": _SHARE, "gemm_bandwidth": _SHARE, "prefill_flops": _SHARE,
    "decode_bandwidth": _SHARE, "prefill_bandwidth": _SHARE, "elementwise": Range(0.001, 100),
    # Beyond 16 it is the maximum within 5 %, and powers of small times would come out as 0.
    "p_norm": Range(1, 16, or_inf=True),
    "layer_us": _MICROSECONDS, "step_us": _MICROSECONDS,
    "decode_seq_us": _MICROSECONDS, "sampled_seq_us": _MICROSECONDS,
    "kernels_per_layer": Range(0, 10_000), "launch_us": _MICROSECONDS,
    "allreduce_us_nvlink": _MICROSECONDS, "allreduce_us_pcie": _MICROSECONDS, "pcie": _SHARE,
    "graph_max": Range(0, 65_536, whole=True)}
_ALIASES = {
    "a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "rtx4090": "rtx-4090",
    "4090": "rtx-4090", "h100-sxm": "h100", "h200-sxm": "h200", "rtxpro6000": "rtx-pro-6000",
    "rtx-pro6000": "rtx-pro-6000"}
_SHARED = ("efficiency", "memory")  # tables of hardware.toml that are not devices


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return packaged("hardware.toml")


def list_hardware() -> list[str]:
    """Names of the devices that ship with the simulator, sorted."""
    return sorted(name for name in _table() if name not in _SHARED)


def load_hardware(name: str) -> Hardware:
    """A device by table name, or from a user's TOML file.

    The file is one flat table with the fields of hardware.toml; `base = "h100"` takes the missing
    ones from a known device. SpecError, with the known names, for anything else.
    """
    if name.endswith(".toml"):
        path = Path(name)
        row = read_toml(path, "a device file with the fields of hardware.toml")
        base = row.pop("base", None)
        if base is not None:
            row = _merged(_row_of(str(base)), row, str(path))
        return from_row(str(row.pop("name", path.stem)), row, str(path))
    return from_row(_canonical(name), dict(_row_of(name)), f"hardware.toml [{_canonical(name)}]")


def from_row(name: str, row: Mapping[str, Any], where: str) -> Hardware:
    """A device from one table. SpecError names the place and the first missing or wrong field."""
    known = {*RATES, *_MEMORY, "link_kind", "efficiency"}
    if extra := sorted(set(row) - known):
        raise SpecError(f"{where}: unknown field {extra[0]!r}; known: {', '.join(sorted(known))}")
    shared = _table()
    rates = {key: float(number(row, key, where, allowed)) for key, allowed in RATES.items()}
    kind = row.get("link_kind", "pcie")
    if kind not in ("nvlink", "pcie"):
        raise SpecError(f"{where}: link_kind={kind!r} must be 'nvlink' or 'pcie'")
    memory = {key: float(number({**shared["memory"], **row}, key, where, allowed))
              for key, allowed in _MEMORY.items()}
    efficiency = _efficiency({**shared["efficiency"], **subtable(row, "efficiency", where)}, where)
    return Hardware(name=name, link_kind=kind, **rates, **memory, efficiency=efficiency)


def kv_blocks(model: ModelSpec, hardware: Hardware, block_size: int, *, tp: int = 1,
              utilization: float | None = None) -> int:
    """How many KV blocks fit beside the weights on one device of `tp`.

    floor((utilization · memory − weights − reserve) / bytes a block). SpecError with the whole
    arithmetic when not even one block fits.
    """
    share = hardware.utilization if utilization is None else utilization
    _MEMORY["utilization"].check(share, "gpu_memory_utilization")
    weights = model.weight_bytes(tp) / GIB
    free = share * hardware.memory - weights - hardware.reserve_gib
    blocks = math.floor(free * GIB / (block_size * model.rank_kv_bytes_per_token(tp)))
    if blocks < 1:
        raise SpecError(
            f"{model.name} does not fit {hardware.name}: {share:g} x {hardware.memory:g} GiB - "
            f"{weights:.1f} GiB weights - {hardware.reserve_gib:g} GiB reserve leaves {free:.1f} "
            f"GiB for KV blocks: raise --tp or choose a larger device")
    return blocks


def _row_of(name: str) -> dict[str, Any]:
    key = _canonical(name)
    table = _table()
    if key not in table or key in _SHARED:
        raise unknown("hardware", name, list_hardware(), "or give your own file.toml")
    return table[key]


def _merged(base: Mapping[str, Any], own: Mapping[str, Any], where: str) -> dict[str, Any]:
    efficiency = {**base.get("efficiency", {}), **subtable(own, "efficiency", where)}
    return {**base, **own, "efficiency": efficiency}


def _efficiency(values: Mapping[str, Any], where: str) -> Efficiency:
    if extra := sorted(set(values) - set(_EFFICIENCY)):
        raise SpecError(f"{where}: unknown efficiency {extra[0]!r}; known: "
                        f"{', '.join(_EFFICIENCY)}")
    for key, allowed in _EFFICIENCY.items():
        allowed.check(values[key], f"{where}: efficiency {key}")
    return Efficiency(**values)


def _canonical(name: str) -> str:
    key = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    return _ALIASES.get(key, key)
