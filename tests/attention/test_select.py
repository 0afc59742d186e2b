"""Choosing a back end by name or by what is possible; what an impossible choice is told."""

from __future__ import annotations

import pytest
import torch

from engine.attention import flash, select
from engine.attention.base import AttentionShape
from engine.attention.select import Entry, availability, choose, make_backend
from engine.core.errors import ConfigError


def shape_on(device: str, **changes) -> AttentionShape:
    given = dict(num_heads=16, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16)
    return AttentionShape(**(given | changes), device=torch.device(device))


@pytest.fixture
def reasons(monkeypatch):
    """reasons(name=why) makes a back end impossible for `why`, or possible where why is None."""
    def set_them(**why: str | None) -> None:
        monkeypatch.setattr(select, "_why_not", lambda entry, shape: why.get(
            next(name for name, known in select.BACKENDS.items() if known is entry)))
    return set_them


def test_auto_takes_compiled_kernels_on_a_cpu(reasons):
    reasons()
    assert choose("auto", shape_on("cpu")) == "cpu"


def test_auto_falls_back_to_torch_on_a_cpu_with_one_line(reasons):
    reasons(cpu="no C++ compiler is installed")
    with pytest.warns(UserWarning) as caught:
        assert make_backend("auto", shape_on("cpu")).name == "torch"
    assert [str(warning.message) for warning in caught] == [
        "compiled attention cannot be had here: no C++ compiler is installed; the 'torch' back end "
        "computes the same, slower"]


def test_auto_says_nothing_where_the_kernels_were_never_meant_to_serve(recwarn):
    assert choose("auto", shape_on("cpu", dtype=torch.float64)) == "torch"
    assert choose("auto", shape_on("cpu", head_dim=12)) == "torch"
    assert not recwarn.list
    with pytest.raises(ConfigError, match="knows float32 and bfloat16, not float64"):
        make_backend("cpu", shape_on("cpu", dtype=torch.float64))


def test_auto_takes_the_best_that_can_on_cuda(reasons):
    reasons()
    assert choose("auto", shape_on("cuda")) == "flash"
    reasons(flash="flash-attn is not installed")
    assert choose("auto", shape_on("cuda")) == "triton"
    reasons(flash="flash-attn is not installed", triton="the package triton is not installed",
            cpu="computes on the CPU, not on cuda")
    assert choose("auto", shape_on("cuda")) == "torch"


def test_unknown_name_lists_the_known_ones_with_why_each_cannot_be_used(reasons):
    reasons(flash="flash-attn is not installed", cpu="computes on the CPU, not on cuda")
    with pytest.raises(ConfigError) as error:
        choose("flashinfer", shape_on("cuda"))
    assert str(error.value) == (
        "attention back end 'flashinfer' is not known; known: auto, flash (not here: flash-attn is "
        "not installed), triton, cpu (not here: computes on the CPU, not on cuda), torch")


def test_known_name_that_cannot_be_used_says_why_and_what_can():
    with pytest.raises(ConfigError) as error:
        make_backend("flash", shape_on("cpu"))
    assert str(error.value).startswith(
        "attention back end 'flash' cannot be used here: needs a CUDA device, not cpu; others: "
        "auto, triton (not here: ")
    assert str(error.value).endswith(", torch")


def test_missing_package_is_a_reason_and_a_broken_module_of_ours_an_error(monkeypatch):
    absent = Entry("engine.attention.triton_paged", "TritonPaged", "triton")

    def importing(missing: str):
        def importer(name: str):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        monkeypatch.setattr(select, "import_module", importer)

    importing("triton.language")
    assert select._why_not(absent, shape_on("cuda")) == "the package triton is not installed"
    importing("engine.attention.base")
    with pytest.raises(ModuleNotFoundError):
        select._why_not(absent, shape_on("cuda"))


def test_every_known_back_end_has_a_class_of_its_name_or_a_reason():
    shape = shape_on("cpu", dtype=torch.float32)
    for name, reason in availability(shape).items():
        assert reason is not None or make_backend(name, shape).name == name
    assert flash.unavailable(shape_on("cpu")) == "needs a CUDA device, not cpu"


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match="15 query heads cannot share 8 K/V heads evenly"):
        make_backend("torch", shape_on("cpu", num_heads=15))
