"""The checking parts of the GPU script, one a process: python -m tests.gpu.parts NAME ARGUMENTS.

Each returns a dict that goes into the JSON; {"skipped": why} where it cannot run here. timing.py
and engine_parts.py have the others.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu.device import Device

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "flash_attn",
            "flash_attn_interface")


def environment(device: Device) -> dict[str, Any]:
    """Versions and the device, so that numbers can be read later."""
    from importlib.metadata import PackageNotFoundError, version
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if not device.rehearsal:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory": properties.total_memory,
                  "capability": torch.cuda.get_device_capability(0), "cuda": torch.version.cuda,
                  "processors": properties.multi_processor_count, "l2": properties.L2_cache_size}
        told = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem",
                               "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
        found["nvidia-smi"] = told.stdout.strip()
    from engine.attention.select import availability
    found["back ends"] = availability(shape(device, 256))
    return found


def shape(device: Device, block_size: int = 16, dtype: torch.dtype = torch.bfloat16):
    """Qwen3-0.6B's attention: 16 query heads, 8 K/V heads of 128."""
    from engine.attention.base import AttentionShape
    if device.rehearsal:
        return AttentionShape(4, 2, 16, min(block_size, 16), torch.float32, torch.device("cpu"))
    return AttentionShape(16, 8, 128, block_size, dtype, torch.device("cuda"))


def subject_for(device: Device, name: str):
    """The back end under test, or None where its package is missing."""
    from tests.attention import backends
    names = {"torch": "torch", "triton": "triton", "triton-small": "triton, small tiles"}
    subjects = backends.interpreted_ones() if device.rehearsal else backends.on_gpu()
    for subject in subjects:
        if subject.name == names.get(name) or (name == "flash" and subject.name[:5] == "flash"):
            return subject
    return None


def verdict(facts: dict[str, Any], failures: dict | list) -> dict[str, Any]:
    """A checking part's result: fine if nothing is in `failures`."""
    if not failures:
        return facts
    return facts | {"ok": False, "error": f"{len(failures)} failures", "failures": failures}


def conformance(device: Device, name: str, dtype_name: str) -> dict[str, Any]:
    """All cases that the back end allows, against the float64 oracle."""
    from tests.attention.cases import run_case
    subject, dtype = subject_for(device, name), getattr(torch, dtype_name)
    if subject is None or dtype not in subject.dtypes:
        return {"skipped": f"{name} in {dtype_name} is not here"}
    cases, failures = subject.cases(dtype), {}
    for case in cases[:3] if device.rehearsal else cases:
        try:
            problems = run_case(subject.make, case, dtype, subject.device)
        except Exception as error:
            problems = [f"{type(error).__name__}: {str(error)[:300]}"]
        if problems:
            failures[case.name] = problems
    return verdict({"back end": subject.name, "cases": len(cases)}, failures)


def far_blocks(device: Device, name: str) -> dict[str, Any]:
    """Blocks past element 2**31 of a cache: 64-bit offsets."""
    from tests.attention.cases import run_far_blocks
    subject = subject_for(device, name)
    if subject is None:
        return {"skipped": f"{name} is not here"}
    sizes = (subject.page,) if subject.page else (16, 64)
    return verdict({}, [f"block {size}: {problem}" for size in sizes for problem in
                        run_far_blocks(subject.make, torch.float16, device.name, size)])


def graph(device: Device, name: str) -> dict[str, Any]:
    """Decode captured in a CUDA graph over static buffers, replayed with other rows, padding rows
    among them; in one part a row and in several."""
    from tests.attention.cases import run_decode_plan
    subject = subject_for(device, name)
    if subject is None:
        return {"skipped": f"{name} is not here"}
    failures = {}
    for block_size in (256,) if subject.page else (8, 16):
        backend = subject.make(shape(device, block_size))
        for processors in (1, 64):
            if hasattr(backend, "processors"):
                backend.processors, backend.least_tiles = processors, 1
            problems = run_decode_plan(backend, device.name, device.capture)
            if problems:
                failures[f"block {block_size}, {processors} processors"] = problems
    return verdict({}, failures)


def upload(device: Device) -> dict[str, Any]:
    """Index arrays of any dtype and shape, empty ones too, arrive as they were."""
    from engine.attention.upload import upload
    arrays = [np.arange(7, dtype=np.int64), np.zeros((0, 3), np.int32),
              np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(9, dtype=np.int32)[::2]]
    moved = upload(arrays, torch.device(device.name))
    same = [np.array_equal(array, tensor.cpu().numpy()) and array.shape == tuple(tensor.shape)
            and tensor.cpu().numpy().dtype == array.dtype
            for array, tensor in zip(arrays, moved, strict=True)]
    aligned = [tensor.data_ptr() % 16 == 0 for tensor in moved] if not device.rehearsal else [True]
    return verdict({}, [] if all(same + aligned) else [f"same {same}, aligned {aligned}"])


def main(arguments: list[str]) -> None:
    from tests.gpu import engine_parts, timing
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(arguments)
    try:
        device = Device.get(given.rehearse, given.seconds)
        if device is None:
            record = {"ok": False, "skipped": "no CUDA device here", "no_device": True}
        else:
            part = next(getattr(module, given.part) for module in (sys.modules[__name__], timing,
                        engine_parts) if hasattr(module, given.part))
            result = part(device, *given.arguments)
            record = {"ok": "skipped" not in result} | result
    except Exception as error:  # recorded, so that the other parts' results are not lost
        record = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000],
                  "traceback": traceback.format_exc()[-3000:]}
    given.out.write_text(json.dumps(record, default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
