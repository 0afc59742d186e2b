"""On an image with nothing but torch, triton, transformers, safetensors and numpy (and what those
five need) the engine, its benchmark, verify and the GPU script work."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BARE = ("torch", "triton", "transformers", "safetensors", "numpy")
PROGRAM = """
import builtins, sys

plain = builtins.__import__

def without(name, globals=None, *more, **named):
    # Only for us: other packages may look for what they like.
    ours = (globals or {}).get("__name__", "").split(".")[0] in ("engine", "tests", "__main__")
    if ours and name.split(".")[0] in BLOCKED:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return plain(name, globals, *more, **named)

builtins.__import__ = without
import engine
assert "torch" not in sys.modules and "transformers" not in sys.modules
from engine import LLM, SamplingParams
from engine.benchmark import measure, warm_up
from engine.verify.check import verify
from engine.workload import Range, make_workload
import tests.gpu.check, tests.gpu.engine_parts

with LLM("tiny", max_model_len=64, preemption="swap", log=sys.argv[1]) as llm:
    (out,) = llm.chat([{"role": "user", "content": "Who is Ada?"}],
                      SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(out.token_ids) == 4
    workload = make_workload(2, Range(3, 5), Range(2, 4), 0, 1024)
    warm_up(llm, workload)
    assert measure(llm, workload, 0.6).output_tokens == sum(workload.outputs)
assert verify("tiny", num_prompts=2, num_outputs=2).good
print("fine")
"""


def test_nothing_but_the_five_packages_is_imported(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    blocked = {line.split(";")[0].split(">")[0].split("=")[0].strip().replace("-", "_").lower()
               for line in named} - set(BARE)
    blocked |= {"pandas", "pytest", "pytest_xdist", "importlinter"}
    assert {"typer", "rich", "simpy", "streamlit", "scipy", "gguf"} <= blocked
    program = f"BLOCKED = {sorted(blocked)!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run.jsonl")], cwd=ROOT, text=True,
        capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "fine"


def test_the_gpu_script_says_in_one_sentence_that_there_is_no_gpu(tmp_path):
    import torch
    if torch.cuda.is_available():
        return
    done = subprocess.run(
        ["bash", "tests/gpu/run.sh"], cwd=ROOT, text=True, capture_output=True, timeout=120,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)})
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "no CUDA device here: nothing was checked"
    assert "Traceback" not in done.stdout + done.stderr
