"""Compiles cpu_kernels.cpp for this very machine, once, and loads it. Needs a C++ compiler only.

The result lies in the user's cache under a name that is a hash of everything it depends on:
source, flags, compiler, processor, OpenMP library. So nothing is ever out of date, a home
directory may be shared by different machines, and two processes that build at once both win.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from engine.cache import cache_dir

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
NATIVE = ("-march=native", "-mcpu=native")  # whichever the compiler knows for this processor
COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 120  # seconds for one compiler call; it takes about four


class NoKernels(Exception):
    """Why there are no compiled kernels here, in a few words."""


@functools.cache
def why_not() -> str | None:
    """Why the kernels cannot be had on this machine; None: they can. Builds them if need be."""
    try:
        load_library()
    except NoKernels as error:
        return str(error)
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, built on the first call on this machine. NoKernels says what failed."""
    compiler = find_compiler()
    openmp = loaded_openmp()
    target = cache_dir() / "kernels" / f"{fingerprint(compiler, openmp)}.so"
    for attempt in (1, 2):
        if not target.exists():
            build(compiler, openmp, target)
        try:
            library = ctypes.CDLL(str(target))
        except OSError as error:
            target.unlink(missing_ok=True)  # cut short or not ours: make it anew, once
            if attempt == 2:
                raise NoKernels(f"what {compiler} made does not load ({error})") from None
            continue
        if library.max_threads() != torch.get_num_threads():
            raise NoKernels("they would bring a second pool of threads beside PyTorch's")
        return library
    raise AssertionError("the second attempt returns or raises")


def find_compiler() -> str:
    """$CXX if it is set, else the first C++ compiler on the path."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NoKernels(f"CXX={wanted} is not a command" if wanted else
                    f"no C++ compiler ({', '.join(COMPILERS)}) is installed")


def loaded_openmp() -> str | None:
    """The OpenMP library that PyTorch computes with. Ours must be the same one: two would start
    twice as many threads as there are cores, which then wait for each other."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.findall(r"(/\S*lib(?:gomp|iomp5|omp)\S*\.so\S*)", maps)
    preferred = sorted(set(found), key=lambda path: ("/torch" not in path, path))
    return preferred[0] if preferred else None


def fingerprint(compiler: str, openmp: str | None) -> str:
    """A name for the build, from everything it depends on."""
    program = os.stat(os.path.realpath(compiler))
    parts = (SOURCE.read_bytes(), FLAGS, NATIVE, compiler, program.st_size, program.st_mtime_ns,
             openmp, processor())
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:32]


def processor() -> str:
    """What -march=native looks at: the processor's name and abilities."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n", 1)[0].splitlines()
    told = [line for line in first if line.startswith(("model name", "flags", "Features", "CPU "))]
    return "\n".join([platform.machine(), *told])


def build(compiler: str, openmp: str | None, target: Path) -> None:
    """Compile to `target`; whoever looks at it meanwhile sees nothing or the whole of it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "kernels.so"
            _compile(compiler, openmp, made)
            os.replace(made, target)
    except OSError as error:
        raise NoKernels(f"{target.parent} cannot be written ({error.strerror})") from None


def _compile(compiler: str, openmp: str | None, made: Path) -> None:
    parts = made.with_suffix(".o")
    said = ""
    for native in NATIVE:
        said = run([compiler, *FLAGS, native, "-c", str(SOURCE), "-o", str(parts)])
        if not said:
            break
    # Linked against the very file that PyTorch uses, where it is known; else the compiler's own.
    said = said or run([compiler, "-shared", str(parts), openmp or "-fopenmp", "-o", str(made)])
    if said:
        raise NoKernels(f"{compiler} fails: {said}")


def run(command: list[str]) -> str:
    """What went wrong, in one line; empty if nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE,
                              errors="replace", stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {PATIENCE} s"
    except OSError as error:
        return str(error.strerror)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"status {done.returncode}"])[0]
