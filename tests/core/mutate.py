"""Mutation testing of engine/core: python -m tests.core.mutate [--module scheduler] [--list].

Each mutant is one small change of one module: a comparison, an operator, a constant, a condition,
a statement left out. It lives in a forked process only (the source is never touched), where the
tests run, nearest ones first, until one fails (see nursery.py). CPU time is limited, so an endless
loop counts as killed. What survives is printed; EQUIVALENT in mutants.py says which survivors no
test can tell.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from tests.core.mutants import EQUIVALENT, changes, reason
from tests.core.nursery import Nursery, other_code

Say = Callable[[str], None]

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "engine" / "core"
SKIPPED = {"__init__", "bench"}

NEAREST = {
    "block_pool": ["pool", "eviction"], "block_manager": ["prefix", "forks", "preemption"],
    "eviction": ["eviction"], "registry": ["eviction", "orders"], "config": ["request"],
    "errors": ["events", "request"], "request": ["request", "prefix", "ends"],
    "params": ["odd_values", "request"], "batch": ["ends", "stable"],
    "cohort": ["cohort", "stable"], "events": ["events"], "replay": ["replay"],
    "insight": ["insight", "prefix"], "intake": ["odd_values", "request", "forks"],
    "policies": ["orders", "batching", "preemption"], "stable": ["stable"],
    "phases": ["batching", "preemption", "forks", "prefix", "orders"],
    "scheduler": ["ends", "lookahead", "forks", "batching", "stable"],
}
HEAVY = ["manager_machine", "walk", "stable"]
PYTEST = ["-o", "addopts=", "-m", "not nightly", "-x", "-q", "-p", "no:cacheprovider", "--tb=no",
          "--no-header", "--strict-markers"]
CPU_LIMIT = 45  # seconds of one mutant, all its tests
ASLEEP = 120  # seconds without any CPU time: a dead lock
MEMORY_LIMIT = 4 << 30  # bytes of address space


@dataclass(frozen=True)
class Mutant:
    module: str
    number: int  # of the change, in the order of `changes`
    line: int
    name: str  # "function: before -> after"; stays the same when lines move

    @property
    def key(self) -> str:
        return f"{self.module}.{self.name}"


def mutants_of(module: str) -> Iterator[Mutant]:
    tree = ast.parse((CORE / f"{module}.py").read_text())
    for number, change in enumerate(changes(tree)):
        yield Mutant(module, number, change.line, change.name)


def compiled(mutant: Mutant) -> CodeType:
    path = CORE / f"{mutant.module}.py"
    tree = ast.parse(path.read_text())
    for number, change in enumerate(changes(tree)):
        if number == mutant.number:
            change.apply()
            break
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves one changed module; everything else is imported as usual."""

    def __init__(self, mutant: Mutant):
        self.name, self.code = f"engine.core.{mutant.module}", compiled(mutant)

    def find_spec(self, name, path, target=None):
        if name == self.name:
            return importlib.util.spec_from_loader(name, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def test_files(module: str) -> list[list[str]]:
    """Two rounds of test files: the nearest, then all others with the heavy ones last."""
    folder = Path(__file__).parent
    there = sorted(path.stem.removeprefix("test_") for path in folder.glob("test_*.py"))
    first = [name for name in NEAREST.get(module, []) if name in there]
    others = [name for name in there if name not in first and name not in HEAVY]
    rounds = [first, others + [name for name in HEAVY if name in there and name not in first]]
    return [[str(folder / f"test_{name}.py") for name in names] for names in rounds if names]


def limits() -> None:
    """What a mutant may use up."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    sys.setrecursionlimit(2000)


def run_tests(mutant: Mutant) -> int:
    """In a forked process: 0 if all tests pass."""
    import pytest
    limits()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.meta_path.insert(0, MutantFinder(mutant))
    for files in test_files(mutant.module):
        if pytest.main([*files, *PYTEST]) != 0:
            return 1
    return 0


def fork(mutant: Mutant) -> int:
    """The id of a process that runs the tests from a fresh start and exits with 0 if the mutant
    survives. It stays in this process group: stopping and continuing the group pauses it all."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run_tests(mutant)
        finally:
            os._exit(code)
    return pid


def survivors(mutants: list[Mutant], jobs: int, say: Say) -> list[Mutant]:
    """Run them all, `jobs` at a time; those that no test noticed."""
    originals = {module: compile((CORE / f"{module}.py").read_text(), str(CORE / f"{module}.py"),
                                 "exec") for module in {mutant.module for mutant in mutants}}
    codes = {mutant: other_code(originals[mutant.module], compiled(mutant)) for mutant in mutants}
    alive, left = in_nursery({mutant: (f"{mutant.module}.{found[0]}", found[1])
                              for mutant, found in codes.items() if found is not None}, jobs, say)
    rest = [mutant for mutant, found in codes.items() if found is None or mutant in left]
    say(f"{len(rest)} from a fresh start")
    return alive + run_all(rest, fork, jobs, say)


def in_nursery(codes: dict[Mutant, tuple[str, CodeType]], jobs: int, say: Say
               ) -> tuple[list[Mutant], set[Mutant]]:
    """Run the mutants of function bodies: the survivors, and those that need a fresh start. In a
    process of its own, so that this one never imports the core."""
    import pytest

    def work(nursery: Nursery) -> None:
        left = {mutant for mutant in codes if not nursery.has_callers(codes[mutant][0])}
        alive = run_all([mutant for mutant in codes if mutant not in left],
                        lambda mutant: nursery.start(*codes[mutant], limits), jobs, say)
        told.write_bytes(pickle.dumps((alive, left)))

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "result"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                pytest.main([str(Path(__file__).parent), *PYTEST, "-s"],
                            plugins=[Nursery(work, CORE, NEAREST)])
                code = 0
            finally:
                os._exit(code)
        os.waitpid(pid, 0)
        if not told.exists():
            sys.exit("the tests fail without any mutant; mend them first")
        return pickle.loads(told.read_bytes())


def run_all(mutants: list[Mutant], start: Callable[[Mutant], int], jobs: int, say: Say
            ) -> list[Mutant]:
    """Start each, `jobs` at a time; those whose process exits with 0."""
    alive: list[Mutant] = []
    running: dict[int, Mutant] = {}
    queue, done, watch = list(reversed(mutants)), 0, Watch()
    while queue or running:
        while queue and len(running) < jobs:
            mutant = queue.pop()
            running[start(mutant)] = mutant
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.005)
            watch.look(running)
            continue
        mutant = running.pop(pid)
        done += 1
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            alive.append(mutant)
            why = reason(mutant.key)
            mark = f"equivalent ({why})" if why else "SURVIVED"
            say(f"[{done}/{len(mutants)}] {mark} line {mutant.line}: {mutant.key}")
        elif done % 50 == 0:
            say(f"[{done}/{len(mutants)}]")
    return alive


class Watch:
    """Ends mutants that sleep for ever. Time while this process itself is stopped, or gets no CPU,
    counts as one second at most: a paused run kills nobody."""

    def __init__(self) -> None:
        self.awake = 0.0  # seconds that this process could look
        self._last = time.monotonic()
        self._seen: dict[int, tuple[str, float]] = {}  # process -> CPU ticks, since when awake

    def look(self, running: Iterable[int]) -> None:
        now = time.monotonic()
        self.awake += min(now - self._last, 1.0)
        self._last = now
        for pid in running:
            with contextlib.suppress(OSError):  # it ended just now
                ticks = " ".join(Path(f"/proc/{pid}/stat").read_text().split()[13:15])
                seen, since = self._seen.get(pid, ("", 0.0))
                if seen != ticks:
                    self._seen[pid] = (ticks, self.awake)
                elif self.awake - since > ASLEEP:
                    os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.core.mutate", description=__doc__)
    parser.add_argument("--module", action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="a sample: each k-th mutant only")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--only", help="only mutants whose name contains this text")
    parser.add_argument("--named-in", type=Path, metavar="FILE",
                        help="only mutants that end a line of this file, say an earlier run's")
    args = parser.parse_args()
    os.chdir(ROOT)
    modules = args.module or sorted(
        path.stem for path in CORE.glob("*.py") if path.stem not in SKIPPED)
    mutants = [mutant for module in modules for mutant in mutants_of(module)]
    mutants = [mutant for mutant in mutants if args.only is None or args.only in mutant.key]
    if args.named_in:
        lines = args.named_in.read_text().splitlines()
        named = {line.partition(": ")[2] if " line " in line else line for line in lines}
        mutants = [mutant for mutant in mutants if mutant.key in named]
    mutants = mutants[::args.every]
    if args.list:
        for mutant in mutants:
            print(mutant.line, mutant.key)
        return
    warm_up()
    begin = time.monotonic()
    with os.fdopen(os.dup(1), "w") as out:  # pytest's own output is not wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        alive = survivors(mutants, args.jobs, lambda text: print(text, file=out, flush=True))
        os.dup2(out.fileno(), 1)
    report(mutants, alive, time.monotonic() - begin)


def warm_up() -> None:
    """Import once what every forked process needs, but nothing of the core."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["TANDEM_MUTANT"] = "1"  # some tests do less then
    import hypothesis.stateful  # noqa: F401
    import pytest
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), \
            contextlib.redirect_stderr(nothing):
        pytest.main([*PYTEST, str(Path(__file__).parent / "no_such_file")], plugins=[])
    assert not any(name.startswith("engine") for name in sys.modules), "the core is loaded already"


def report(mutants: list[Mutant], alive: list[Mutant], seconds: float) -> None:
    total, lost = Counter(m.module for m in mutants), Counter(m.module for m in alive)
    known = Counter(m.module for m in alive if reason(m.key))
    print(f"\n{'module':16}{'mutants':>8}{'killed':>8}{'equiv.':>8}{'survived':>9}"
          f"{'killed of the rest':>20}")
    for module in [*total, "all"]:
        count, left, same = ((sum(counter.values()) if module == "all" else counter[module])
                             for counter in (total, lost, known))
        share = (count - left) / max(1, count - same)
        print(f"{module:16}{count:8}{count - left:8}{same:8}{left - same:9}{share:19.1%}")
    print(f"{seconds:.0f} s")
    for mutant in alive:
        if not reason(mutant.key):
            print(f"engine/core/{mutant.module}.py:{mutant.line}: {mutant.name}")
    for place, part in EQUIVALENT:  # of modules that were run whole
        if place.partition(".")[0] in total and not any(
                m.key.startswith(place + ": ") and part in m.name for m in mutants):
            print(f"no such mutant any more: {place}: {part}")


if __name__ == "__main__":
    main()
