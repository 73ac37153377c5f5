"""Commands run in the test's own process: one of their own would import torch, which takes longer
than the runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from kvkeep.cli.main import main


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A command sets up its own process, which is ours here."""
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    yield
    torch.set_num_threads(threads)
    logging.disable(disabled)


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`refused(words...)` runs `kvkeep` with options that are wrong; returns what it says."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["kvkeep", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 2 and "hint: " in said.err and not said.out
        return said.err

    return run
