"""A fixture that runs `python -m engine` in this process."""

from __future__ import annotations

import sys

import pytest

from engine.__main__ import main


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> (status, stdout, stderr)."""
    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["engine", *arguments])
        monkeypatch.setenv("COLUMNS", "120")
        status = main()
        out, err = capsys.readouterr()
        return status, out, err
    return call
