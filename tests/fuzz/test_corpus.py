"""Inputs that once reached something, or found something: each target takes all of its own in
silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep_lab.fuzz.targets import TARGETS, load, read_corpus

CORPUS = Path(__file__).with_name("corpus")


def test_every_target_has_a_corpus_and_nobody_else() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {f"{target}.txt" for target in TARGETS}
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 200_000, "small enough to read"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_in_the_corpus_finds_nothing(target: str) -> None:
    run, inputs = load(target), read_corpus(CORPUS / f"{target}.txt")
    assert len(inputs) >= 5
    assert sum(run(data).messages for data in inputs) >= len(inputs)
