"""Building on demand: once a machine, by several at once, and what goes wrong without a crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.attention import cpu_build
from engine.attention.cpu_build import NoKernels

TINY = '#include <omp.h>\nextern "C" int max_threads() { return omp_get_max_threads(); }\n'
ANY_COMPILER = any(shutil.which(name) for name in cpu_build.COMPILERS)

needs_compiler = pytest.mark.skipif(not ANY_COMPILER, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache and a source that compiles at once."""
    source = tmp_path / "kernels.cpp"
    source.write_text(TINY)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpu_build, "SOURCE", source)
    return source


def load():
    return cpu_build.load_library.__wrapped__()


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


@needs_compiler
def test_it_is_built_once_and_again_only_when_the_source_changes(tmp_path, own_cache):
    load()
    [first] = built(tmp_path)
    made = first.stat().st_mtime_ns
    load()
    assert [first] == built(tmp_path) and first.stat().st_mtime_ns == made
    own_cache.write_text(TINY + "// changed\n")
    load()
    assert len(built(tmp_path)) == 2


@needs_compiler
def test_a_file_that_is_no_library_is_made_anew(tmp_path):
    compiler = cpu_build.find_compiler()
    name = cpu_build.fingerprint(compiler, cpu_build.loaded_openmp())
    file = tmp_path / "cache" / "kernels" / f"{name}.so"
    file.parent.mkdir(parents=True)
    file.write_text("no library")
    assert load().max_threads() >= 1
    assert built(tmp_path) == [file] and file.stat().st_size > 1000


@needs_compiler
def test_one_pool_of_threads():
    """Loading ours adds no OpenMP library to PyTorch's, and set_num_threads reaches it."""
    code = ("import torch, sys; from engine.attention import cpu_build as b\n"
            "maps = lambda: {l.split()[-1] for l in open('/proc/self/maps')\n"
            "    if 'gomp' in l or 'libomp' in l or 'iomp' in l}\n"
            "before = maps(); lib = b.load_library(); assert maps() == before, maps()\n"
            "torch.set_num_threads(3); assert lib.max_threads() == 3")
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc/self/maps here")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "TANDEM_CACHE": os.environ["TANDEM_CACHE"]},
                          cwd=Path(cpu_build.__file__).parents[2])
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path, own_cache):
    code = ("from pathlib import Path; from engine.attention import cpu_build as b; import sys\n"
            "b.SOURCE = Path(sys.argv[1]); print(b.load_library().max_threads() > 0)")
    running = [subprocess.Popen([sys.executable, "-c", code, str(own_cache)],
                                stdout=subprocess.PIPE, text=True,
                                cwd=Path(cpu_build.__file__).parents[2]) for _ in range(2)]
    assert [process.communicate()[0] for process in running] == ["True\n", "True\n"]
    assert len(built(tmp_path)) == 1  # and no scratch folder is left


def test_no_compiler_is_a_reason(monkeypatch):
    monkeypatch.setattr(cpu_build.shutil, "which", lambda name: None)
    with pytest.raises(NoKernels, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        load()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoKernels, match="CXX=no-such-compiler is not a command"):
        load()


@needs_compiler
def test_a_source_that_does_not_compile_is_a_reason_in_one_line(own_cache):
    own_cache.write_text("int main( {")
    with pytest.raises(NoKernels) as error:
        load()
    assert "fails: " in str(error.value) and "error: " in str(error.value)
    assert "\n" not in str(error.value)


@needs_compiler
def test_a_library_that_cannot_be_linked_or_loaded_is_a_reason(own_cache):
    own_cache.write_text('void missing(); extern "C" int max_threads() { missing(); return 1; }')
    with pytest.raises(NoKernels, match="does not load"):
        load()


@pytest.mark.skipif(shutil.which("false") is None, reason="no command `false` here")
def test_a_compiler_that_only_fails_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NoKernels, match="false fails: status 1"):
        load()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(NoKernels, match="cannot be written"):
        load()


def test_another_processor_has_another_build(monkeypatch):
    compiler = sys.executable  # any program will do
    mine = cpu_build.fingerprint(compiler, None)
    monkeypatch.setattr(cpu_build, "processor", lambda: "something else")
    assert cpu_build.fingerprint(compiler, None) != mine
    assert cpu_build.fingerprint(compiler, "/libgomp.so.1") != cpu_build.fingerprint(compiler, None)
