"""The conformance suite accepts a right back end and finds each of the usual mistakes."""

from __future__ import annotations

import pytest
import torch

from tests.attention.cases import CASES, run_case
from tests.attention.naive import FAULTS, Naive


def test_plain_loops_over_block_tables_pass():
    for case in CASES:
        assert run_case(Naive, case, torch.float64, "cpu") == [], case.name


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found(fault: str):
    found = [case.name for case in CASES
             if run_case(lambda shape: Naive(shape, fault), case, torch.float64, "cpu")]
    assert found, FAULTS[fault]
