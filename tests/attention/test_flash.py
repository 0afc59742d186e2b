"""What the flash back end asks of the packages, and when it says that it cannot."""

from __future__ import annotations

import pytest
import torch

from engine.attention import flash
from engine.attention.base import AttentionShape
from engine.attention.flash import FlashPaged, Library, find_library, store_by_index
from engine.core.errors import ConfigError
from tests.attention.cases import run_decode_plan
from tests.attention.flash_standin import FlashAttn2, FlashAttn3
from tests.attention.oracle import Case, Row, build

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Recorder:
    """A stand-in that notes which functions are called, with how many tokens, paged or not."""

    def __init__(self, module):
        self.module, self.calls = module, []

    def __getattr__(self, name: str):
        def call(q, *args, **kwargs):
            paged = kwargs.get("block_table") is not None or kwargs.get("page_table") is not None
            self.calls.append((name, len(q), "paged" if paged else "dense"))
            return getattr(self.module, name)(q, *args, **kwargs)
        return call


def calls_for(version: int, *rows: Row, shuffled: bool = False) -> list[tuple[str, int, str]]:
    recorder = Recorder(FlashAttn2 if version == 2 else FlashAttn3)
    case = Case("recorded", rows, block_size=256, shuffled=shuffled, seed=1)
    step = build(case, torch.float16, CPU)
    backend = FlashPaged(case.shape(torch.float16, CPU), Library(version, recorder))
    backend.attend(backend.plan(step.inputs, step.num_blocks), step.q, step.k, step.v, step.k_cache,
                   step.v_cache)
    return recorder.calls


KVCACHE, VARLEN = "flash_attn_with_kvcache", "flash_attn_varlen_func"


@pytest.mark.parametrize(("rows", "calls"), [
    ([Row(1, 4), Row(1, 300)], [(KVCACHE, 2, "paged")]),
    ([Row(5), Row(9)], [(VARLEN, 14, "dense")]),  # nothing cached: this step's K and V are all
    ([Row(5), Row(9, 20)], [(VARLEN, 14, "paged")]),
    ([Row(1, 4), Row(5, 3)], [(KVCACHE, 1, "paged"), (VARLEN, 5, "paged")])])
def test_flash_attn_2_gets_single_tokens_and_chunks_apart(rows, calls):
    assert calls_for(2, *rows) == calls


def test_flash_attn_2_takes_single_tokens_as_chunks_where_they_do_not_come_first():
    calls = calls_for(2, Row(5, 2), Row(1, 9), Row(4, 6), Row(1, 3), shuffled=True)
    assert calls[-1][0] == VARLEN and sum(tokens for _, tokens, _ in calls) == 11


@pytest.mark.parametrize(("rows", "calls"), [
    ([Row(1, 4), Row(1, 300)], [(KVCACHE, 2, "paged")]),
    ([Row(1, 4), Row(5, 3), Row(4)], [(KVCACHE, 10, "paged")])])
def test_flash_attn_3_gets_everything_in_one_call(rows, calls):
    assert calls_for(3, *rows) == calls


@pytest.mark.parametrize(("version", "module", "block_size"),
                         [(2, FlashAttn2, 256), (3, FlashAttn3, 16)])
def test_decode_plan_follows_its_buffers(version, module, block_size):
    shape = AttentionShape(4, 2, 16, block_size, torch.float16, CPU)
    out = torch.empty(4, 64, dtype=torch.float16)
    assert run_decode_plan(FlashPaged(shape, Library(version, module)), CPU,
                           lambda call: (lambda: out.copy_(call()), out)) == []


def test_store_by_index_skips_minus_1():
    cache = torch.zeros(3, 4, 2, 8)
    k = torch.randn(3, 2, 8)
    store_by_index(k, k, cache, cache.clone(), torch.tensor([9, -1, 2]))
    assert torch.equal(cache.view(12, 2, 8)[[9, 2]], k[[0, 2]])
    assert int((cache != 0).any(-1).any(-1).sum()) == 2


@pytest.fixture
def machine(monkeypatch):
    """machine(capability, **modules): a CUDA device and packages that exist only on paper."""
    def set_up(capability: tuple[int, int], **modules) -> None:
        def importer(name: str):
            found = modules.get(name, ModuleNotFoundError(f"No module named {name!r}"))
            if isinstance(found, Exception):
                raise found
            return found
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(flash, "import_module", importer)
    return set_up


def shape_of(dtype=torch.bfloat16, head_dim=128, block_size=256, device=CUDA) -> AttentionShape:
    return AttentionShape(16, 8, head_dim, block_size, dtype, device)


def test_takes_flash_attn_3_on_hopper_and_2_elsewhere(machine):
    packages = dict(flash_attn=FlashAttn2, flash_attn_interface=FlashAttn3)
    machine((9, 0), **packages)
    assert find_library(shape_of(block_size=16)) == Library(3, FlashAttn3)
    machine((8, 9), **packages)
    assert find_library(shape_of()) == Library(2, FlashAttn2)
    machine((9, 0), flash_attn=FlashAttn2)
    assert find_library(shape_of()) == Library(2, FlashAttn2)


@pytest.mark.parametrize(("shape", "words"), [
    (shape_of(device=CPU), "needs a CUDA device, not cpu"),
    (shape_of(dtype=torch.float32), "takes float16 and bfloat16, not float32"),
    (shape_of(head_dim=12), "in multiples of 8, not 12"),
    (shape_of(block_size=16), "blocks of a multiple of 256 tokens, not 16")])
def test_says_what_does_not_fit(machine, shape, words):
    machine((8, 0), flash_attn=FlashAttn2)
    assert words in find_library(shape)
    with pytest.raises(ConfigError, match="cannot serve this model"):
        FlashPaged(shape)


def test_says_that_nothing_is_installed_or_that_it_does_not_import(machine):
    machine((9, 0))
    assert find_library(shape_of()) == ("flash-attn 3 (hopper) is not installed; flash-attn is not "
                                        "installed")
    machine((7, 5), flash_attn=ImportError("undefined symbol: _ZN3c10\nmore"))
    assert find_library(shape_of()) == (
        "flash-attn 3 (hopper) needs compute capability 9.x, not 7.5; flash-attn needs compute "
        "capability 8.0 or higher, not 7.5")
    machine((8, 0), flash_attn=ImportError("undefined symbol: _ZN3c10\nmore"))
    assert find_library(shape_of()).endswith("does not import (undefined symbol: _ZN3c10)")
