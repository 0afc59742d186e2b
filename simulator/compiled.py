"""The core, the loop and the hot half of the simulator as machine code: the same files, compiled.

    python -m simulator compile

has mypyc make extension modules of them, in the user's cache, under a name that is a hash of their
source and of this Python: nothing is ever out of date, an edited file is simply interpreted again.
From then on `python -m simulator` loads them in place of the files, and gives the same logs, byte
for byte. Only it does, or who sets TANDEM_COMPILED=1: compiled classes cannot be subclassed or
patched, which is what a course is for. The standard library only: this must be imported before what
it replaces.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from engine.cache import cache_dir

ROOT = Path(__file__).parents[1]
# What a simulated step goes through. Not the errors: others inherit from them. mypyc 2.4 mixes up
# the arguments where one of these calls another with * or **, so none does.
MODULES = (
    "engine.core.batch", "engine.core.block_manager", "engine.core.block_pool",
    "engine.core.cohort", "engine.core.eviction", "engine.core.intake", "engine.core.phases",
    "engine.core.policies", "engine.core.request", "engine.core.scheduler", "engine.core.stable",
    "engine.loop", "simulator.basis", "simulator.cost", "simulator.disagg", "simulator.fitted",
    "simulator.replica", "simulator.shape", "simulator.timings", "simulator.world")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
SWITCH = "TANDEM_COMPILED"  # 1: use them wherever the simulator is imported; 0: nowhere
DIGEST = "digest.txt"  # of the modules beside it
PATIENCE = 1800  # seconds; it takes about one minute

_BUILD = """
import os, sys
from setuptools import setup
from mypyc.build import mypycify
modules = mypycify(["--config-file=", "--follow-imports=skip", "--ignore-missing-imports",
                    "--no-warn-unused-ignores", *sys.argv[2:]],
                   opt_level=sys.argv[1], debug_level="0", multi_file=True)
setup(name="compiled", py_modules=[], ext_modules=modules, script_args=[
    "-q", "build_ext", "--build-lib", "made", "--parallel", str(os.cpu_count() or 1)])
"""


class CannotCompile(Exception):
    """Why there is no compiled core, and what to do."""


def place() -> Path:
    """Where the compiled modules of the source as it is now lie, whether they are there or not."""
    parts = [SUFFIX, sys.version, *(_source(name).read_text("utf-8") for name in MODULES)]
    name = hashlib.sha256("\0".join([*MODULES, *parts]).encode()).hexdigest()[:32]
    return cache_dir() / "compiled" / name


def use() -> bool:
    """Load the compiled modules from now on, if they are there, whole, and not turned off. False if
    not, or if it is too late because one was imported already."""
    if in_use():
        return True
    if os.environ.get(SWITCH) == "0" or any(name in sys.modules for name in MODULES):
        return False
    folder = place()
    if not _is_whole(folder):
        return False
    sys.meta_path.insert(0, _Finder(folder))
    return True


def use_everywhere() -> None:
    """The same, in the processes that this one starts as well; what is damaged is told."""
    os.environ.setdefault(SWITCH, "1")
    if not use() and os.environ[SWITCH] == "1" and place().is_dir():
        print(f"warning: the compiled modules in {place()} are damaged, so the simulator is "
              f"interpreted: python -m simulator compile makes them anew", file=sys.stderr)


def in_use() -> bool:
    """True if this process runs compiled modules."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def build(optimize: int = 3) -> bool:
    """Compile the modules. False if they are there, whole. Takes about a minute; CannotCompile says
    why it is not to be. `optimize` is the C compiler's level, 0 to 3."""
    folder = place()
    if _is_whole(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        _run(Path(work), optimize)
        ours = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(Path(work) / "made", ours)
    (ours / DIGEST).write_text(_digest(ours), "utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    try:
        ours.rename(folder)
    except OSError:  # another process was quicker: as good
        shutil.rmtree(ours, ignore_errors=True)
        if not _is_whole(folder):
            raise
    return True


def _is_whole(folder: Path) -> bool:
    """A library that was cut short would end the process that loads it."""
    try:
        return (folder / DIGEST).read_text("utf-8") == _digest(folder)
    except OSError:
        return False


def _digest(folder: Path) -> str:
    files = sorted(folder.rglob(f"*{SUFFIX}"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
                          + str(len(files)).encode()).hexdigest()


def _run(work: Path, optimize: int) -> None:
    """Compile copies of the modules, which know nobody but each other, into work/made."""
    files = []
    for name in MODULES:
        copy = work / _source(name).relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(_source(name).read_bytes())
        for package in (copy.parent, *copy.parent.parents):
            if package == work:
                break
            (package / "__init__.py").touch()
        files.append(str(copy.relative_to(work)))
    try:
        done = subprocess.run([sys.executable, "-c", _BUILD, str(optimize), *files], cwd=work,
                              text=True, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise CannotCompile(f"compiling took more than {PATIENCE} s: try on a machine that does "
                            f"less else") from None
    if done.returncode:
        raise CannotCompile(_sentence((done.stdout + done.stderr).splitlines(), done.returncode))


def _sentence(said: Sequence[str], status: int) -> str:
    """Of what a compiler says, the last line that speaks of an error."""
    reason = next((line.strip() for line in reversed(said) if "error" in line.lower()),
                  f"it ended with status {status}")
    if "No module named" in reason:
        return f"compiling needs mypy and setuptools ({reason}): pip install -e '.[fast]'"
    return (f"compiling failed ({reason}): are there a C compiler and Python's headers? The "
            f"simulator works without")


def _source(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


class _Finder(MetaPathFinder):
    """Finds the compiled modules, and the library they share, in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        file = self._folder.joinpath(*fullname.split("."))
        file = file.with_name(file.name + SUFFIX)
        if not file.is_file():
            return None
        return spec_from_file_location(fullname, file,
                                       loader=ExtensionFileLoader(fullname, str(file)))
