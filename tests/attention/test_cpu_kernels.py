"""The compiled kernels beyond the conformance suite: the small operations, odd layouts, threads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from engine.attention import cpu_build, cpu_paged
from engine.attention.cpu_kernels import DTYPES, Kernels
from engine.attention.cpu_paged import CpuPaged
from tests.attention.cases import run_case, run_far_blocks
from tests.attention.oracle import Case, Row

pytestmark = pytest.mark.skipif(cpu_build.why_not() is not None,
                                reason=f"no compiled kernels: {cpu_build.why_not()}")

dtypes = pytest.mark.parametrize("dtype", list(DTYPES), ids=str)


@pytest.fixture
def threads():
    """threads(n) for this test only."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def close(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within two roundings of the largest value of a row; what is next to nothing may be 0."""
    scale = exact.abs().amax(dim=-1, keepdim=True).clamp_min(1e-25)
    return bool(((ours.double() - exact).abs() <= 2 * torch.finfo(ours.dtype).eps * scale).all())


def rounding(terms: int) -> float:
    """How far a float32 sum of so many terms may be off, as a share of the sum of their sizes: in
    any order of adding, and always, not just as a rule (Higham, "Accuracy and Stability of
    Numerical Algorithms", section 3.1). A term left out is far more."""
    unit = torch.finfo(torch.float32).eps / 2
    return terms * unit / (1 - terms * unit)


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (5, 576), (3, 4, 64), (70, 512)], ids=str)
def test_rms_norm_equals_float64(dtype, shape):
    x, weight = torch.randn(shape).mul(50).to(dtype), torch.rand(shape[-1]).to(dtype)
    exact = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    assert close(Kernels(dtype).rms_norm(x, weight, 1e-5), exact)


@dtypes
def test_rms_norm_of_some_heads_of_a_projection(dtype):
    qkv, weight = torch.randn(6, 5, 16).to(dtype), torch.rand(16).to(dtype)
    ours = Kernels(dtype).rms_norm(qkv[:, 1:3], weight, 1e-6)
    assert ours.is_contiguous()
    assert torch.equal(ours, Kernels(dtype).rms_norm(qkv[:, 1:3].contiguous(), weight, 1e-6))


@dtypes
def test_add_rms_norm_gives_the_sum_and_its_norm(dtype):
    x, add, weight = torch.randn(9, 40).to(dtype), torch.randn(9, 40).to(dtype), torch.ones(40)
    normed, sums = Kernels(dtype).add_rms_norm(x, add, weight.to(dtype), 1e-5)
    assert torch.equal(sums, x + add)
    assert torch.equal(normed, Kernels(dtype).rms_norm(sums, weight.to(dtype), 1e-5))


@dtypes
def test_rotate_equals_float64_and_leaves_other_heads_alone(dtype):
    qkv = torch.randn(4, 7, 32).to(dtype)
    cos, sin = torch.randn(2, 4, 1, 32).to(dtype)
    before, half = qkv.double(), qkv.double()[:, :5]
    swapped = torch.cat((half[..., 16:], half[..., :16]), -1)
    exact = half * cos.double() + swapped * sin.double()
    view = qkv[:, :5]
    assert Kernels(dtype).rotate(view, cos, sin) is view
    assert torch.equal(qkv[:, 5:].double(), before[:, 5:])
    assert close(qkv[:, :5], exact)


@dtypes
def test_silu_mul_equals_float64_from_tiny_to_huge(dtype):
    x = torch.linspace(-120, 120, 2 * 16 * 40).view(16, 80)[:, torch.randperm(80)].to(dtype)
    exact = F.silu(x[:, :40].double()) * x[:, 40:].double()
    assert close(Kernels(dtype).silu_mul(x), exact)


@dtypes
def test_nan_and_infinity_show_in_their_row_alone(dtype):
    kernels, bad = Kernels(dtype), torch.randn(3, 16).to(dtype)
    bad[1, 3], weight = math.nan, torch.ones(16, dtype=dtype)
    for out in (kernels.rms_norm(bad, weight, 1e-5), kernels.silu_mul(bad),
                kernels.add_rms_norm(bad, bad, weight, 1e-5)[0]):
        assert out[1].isnan().any() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("many", [1, 2, 3])
def test_any_number_of_threads_computes_the_same_bits(many, threads):
    """One item for all heads, or one a head: no sum depends on how work is dealt out."""
    rows = (Row(1, 40), Row(30, 3), Row(1, 5), Row(2, 90))
    outs = []
    for count in (1, many):
        threads(count)
        outs.append(_outputs(Case("threads", rows, kv_heads=3, group=3, head_dim=64)))
    assert torch.equal(*outs)


def test_items_a_head_and_items_of_all_heads_agree(monkeypatch):
    case = Case("split", (Row(1, 40), Row(30, 3), Row(2, 90)), kv_heads=4, group=2, head_dim=24)
    monkeypatch.setattr(cpu_paged, "ITEMS_A_THREAD", 0)
    whole = _outputs(case)
    monkeypatch.setattr(cpu_paged, "ITEMS_A_THREAD", 10**6)
    assert torch.equal(_outputs(case), whole)


def _outputs(case: Case) -> torch.Tensor:
    from tests.attention.oracle import build
    step = build(case, torch.float32, "cpu")
    backend = CpuPaged(case.shape(torch.float32, "cpu"))
    return backend.attend(backend.plan(step.inputs, step.num_blocks), step.q, step.k, step.v,
                          step.k_cache, step.v_cache)


@pytest.mark.parametrize("block_size", [16, 64])
def test_offsets_past_2_31_elements_are_64_bit(block_size):
    try:
        problems = run_far_blocks(CpuPaged, torch.bfloat16, "cpu", block_size)
    except RuntimeError as error:  # the allocator's refusal
        pytest.skip(f"cannot reserve 8.6 GB of addresses here: {str(error).splitlines()[0]}")
    assert problems == []


def test_queries_laid_out_head_by_head_are_copied():
    case = Case("transposed", (Row(1, 9), Row(4, 2)))
    made: list = []

    class Transposing(CpuPaged):
        def attend(self, plan, q, k, v, *caches):
            made.append(1)
            turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
            return super().attend(plan, *turned, *caches)
    assert run_case(Transposing, case, torch.float32, "cpu") == [] and made


def test_what_the_kernels_are_not_for_is_named():
    shape = Case("x", (Row(1),), head_dim=12).shape(torch.float32, "cpu")
    assert cpu_paged.unavailable(shape) == "needs a head_dim that is a multiple of 8, not 12"
    shape = Case("x", (Row(1),)).shape(torch.float16, "cpu")
    assert cpu_paged.unavailable(shape) == "knows float32 and bfloat16, not float16"
    shape = Case("x", (Row(1),)).shape(torch.float32, "cuda")
    assert cpu_paged.unavailable(shape) == "computes on the CPU, not on cuda"


# ------------------------------------------------------------------------------ matrix products

@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 97, 200])
@pytest.mark.parametrize("biased", [True, False])
def test_products_equal_float64(rows, biased):
    """Strips of every height, one block of rows and several; depths that are no multiple."""
    for depth, width in ((7, 16), (64, 48), (577, 160)):
        x, weight = torch.randn(rows, depth), torch.randn(width, depth)
        bias = torch.randn(width) if biased else None
        kernels = Kernels(torch.float32)
        ours = kernels.multiply(x, kernels.pack(weight), bias)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert ours.shape == (rows, width)
        sizes = F.linear(x.double().abs(), weight.double().abs(),
                         None if bias is None else bias.double().abs())
        assert bool(((ours.double() - exact).abs() <= rounding(depth + 1) * sizes).all())


def test_products_of_a_row_do_not_depend_on_its_batch(threads):
    """Not even on the number of threads: seeded requests give the same tokens in any company."""
    kernels, x = Kernels(torch.float32), torch.randn(130, 64)
    panels = kernels.pack(torch.randn(48, 64))
    whole = kernels.multiply(x, panels, None)
    for count in (1, 3):
        threads(count)
        for rows in (slice(0, 1), slice(5, 12), slice(90, 130)):
            assert torch.equal(kernels.multiply(x[rows], panels, None), whole[rows])


def test_products_read_rows_of_any_layout_and_keep_a_nan_in_its_row():
    kernels, x = Kernels(torch.float32), torch.randn(8, 5).t()
    x[2, 3] = math.nan
    out = kernels.multiply(x, kernels.pack(torch.randn(16, 8)), None)
    assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all()


def test_weights_that_do_not_fit_are_left_to_pytorch():
    assert Kernels(torch.float32).pack(torch.randn(17, 8)) is None
    assert Kernels(torch.bfloat16).pack(torch.randn(16, 8).bfloat16()) is None
