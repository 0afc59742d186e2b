"""One suite for every attention back end: cases.py against the float64 oracle.

In a process started with TRITON_INTERPRET=1 (test_triton.py starts one) it runs Triton's kernels;
else the torch back end and the flash back end on strict stand-ins. tests/gpu runs the same cases
on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.backends import Subject, interpreted, interpreted_ones, on_cpu
from tests.attention.cases import run_case
from tests.attention.oracle import Case, Row

SUBJECTS = interpreted_ones() if interpreted() else on_cpu()
RUNS = [(subject, dtype, case) for subject in SUBJECTS for dtype in subject.dtypes
        for case in subject.cases(dtype)]


def _id(value) -> str:
    if isinstance(value, torch.dtype):
        return str(value).split(".")[-1]
    return value.name


@pytest.mark.parametrize(("subject", "dtype", "case"), RUNS, ids=_id)
def test_equals_the_oracle_and_writes_nothing_else(subject: Subject, dtype, case: Case):
    assert run_case(subject.make, case, dtype, subject.device) == []


@pytest.mark.parametrize("subject", SUBJECTS, ids=_id)
def test_one_plan_serves_every_layer(subject: Subject):
    [case] = [case for case in subject.cases(subject.dtypes[0])
              if case.name == "decodes and prefills together"]
    assert run_case(subject.make, case, subject.dtypes[0], subject.device, layers=3) == []


@st.composite
def steps(draw, largest_block: int = 9, most_rows: int = 5, most_tokens: int = 12) -> Case:
    """Any step: rows of any length, some sharing the blocks of an earlier one."""
    block_size = draw(st.integers(1, largest_block))
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, most_rows))):
        new = draw(st.one_of(st.just(1), st.integers(1, most_tokens)))
        row = Row(new, draw(st.integers(0, 3 * most_tokens)),
                  written=new == 1 and draw(st.booleans()))
        owners = [at for at, other in enumerate(rows) if other.owner is None]
        if owners and not row.written and draw(st.booleans()):
            owner = draw(st.sampled_from(owners))
            shared = min((rows[owner].cached + rows[owner].new) // block_size,
                         row.cached // block_size)
            row = Row(new, row.cached, owner, draw(st.integers(0, shared)))
        rows.append(row)
    return Case("drawn", tuple(rows), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 8])),
                draw(st.sampled_from([8, 16, 24, 40])), block_size,
                draw(st.sampled_from([0.0, 0.0, 1e4])), draw(st.booleans()), draw(st.booleans()),
                draw(st.integers(0, 2**16)))


@pytest.mark.parametrize("subject", [one for one in SUBJECTS if one.page is None], ids=_id)
def test_any_step_equals_the_oracle(subject: Subject):
    slow = "triton" in subject.name

    @settings(max_examples=4 if slow else 80, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(steps())
    def check(case: Case) -> None:
        assert run_case(subject.make, case, subject.dtypes[0], subject.device) == []

    check()
