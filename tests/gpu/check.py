"""Run the parts of parts.py, each in a process of its own, and write one JSON.

A part that raises, hangs, or takes the device down with it costs only itself: its record has the
error. The file is written anew after every part, so that a machine that is taken away leaves what
was known by then. Parts that only check run side by side; parts that time run alone, and are told
how long they have. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 10  # seconds kept for writing up

# (part, seconds it may take); "side by side" parts compile a lot and time nothing.
FIRST = [("environment", 60)]
SIDE_BY_SIDE = [
    (f"conformance {subject} {dtype}", 300)
    for subject, dtypes in (
        ("triton", ("float32", "bfloat16", "float16")),  # the slowest to compile first
        ("triton-small", ("bfloat16",)),
        ("torch", ("bfloat16", "float32")),
        ("flash", ("bfloat16", "float16")))
    for dtype in dtypes
] + [("far_blocks triton", 180), ("far_blocks flash", 180), ("graph triton", 180),
     ("graph flash", 180), ("upload", 60), ("engine_tokens", 240), ("engine_logits", 120)]
ALONE = [("bandwidth", 60), ("engine_bench", 150), ("time_decode", 150), ("time_prefill", 120),
         ("time_store", 60), ("sweep_decode", 120), ("sweep_prefill", 120)]


def run_part(name: str, limit: float, options: list[str]) -> dict[str, Any]:
    """One part's record: {"ok", "seconds"} and its result, or {"error"}."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "part.json"
        command = [sys.executable, "-m", "tests.gpu.parts", *name.split(), "--out", str(target),
                   "--seconds", str(limit), *options]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
            if target.exists():
                record = json.loads(target.read_text())
            else:
                record = {"ok": False, "error": f"exit status {done.returncode} without a result",
                          "log": (done.stdout + done.stderr)[-3000:]}
        except subprocess.TimeoutExpired:
            record = {"ok": False, "error": f"took more than {limit:.0f} s"}
        except Exception as error:  # whatever it is, the other parts go on
            record = {"ok": False, "error": repr(error)}
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def run_all(minutes: float, workers: int, options: list[str], save) -> dict[str, Any]:
    """Every part's record by name; save(records) is called whenever one is done."""
    end = time.perf_counter() + 60 * minutes - RESERVE
    records: dict[str, Any] = {}
    lock = Lock()

    def run(part: tuple[str, float]) -> None:
        name, limit = part
        left = end - time.perf_counter()
        record = (run_part(name, min(limit, left), options) if left > 5
                  else {"ok": False, "error": "no time left"})
        with lock:
            records[name] = record
            print(f"{name}: {'ok' if record['ok'] else record.get('skipped') or record['error']} "
                  f"({record.get('seconds', 0)} s)")
            save(records)

    for part in FIRST:
        run(part)
    if any("no_device" in record for record in records.values()):
        return records
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, SIDE_BY_SIDE))
    for part in ALONE:
        run(part)
    return records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--workers", type=int, default=12, help="checking parts at the same time")
    parser.add_argument("--rehearse", action="store_true",
                        help="on a CPU, tiny, under Triton's interpreter: tests this script")
    given = parser.parse_args(arguments)
    started = time.time()

    def save(records: dict[str, Any]) -> None:
        failed = sorted(name for name, record in records.items()
                        if not record["ok"] and "skipped" not in record)
        text = json.dumps({"started": started, "seconds": round(time.time() - started, 1),
                           "failed": failed, "parts": records}, indent=1)
        fresh = given.out.with_name(given.out.name + ".new")
        fresh.write_text(text)
        fresh.replace(given.out)

    given.out.parent.mkdir(parents=True, exist_ok=True)
    records = run_all(given.minutes, given.workers, ["--rehearse"] if given.rehearse else [], save)
    if any("no_device" in record for record in records.values()):
        print("no CUDA device here: nothing was checked")
        return 2
    failed = json.loads(given.out.read_text())["failed"]
    print(f"{given.out}: {len(records)} parts, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
