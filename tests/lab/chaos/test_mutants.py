from __future__ import annotations

import pytest

from kvkeep.server.sessions import ServerSession
from kvkeep_lab.chaos.mutants import MUTANTS, planted


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_there_while_it_is_planted_and_not_afterwards(name: str) -> None:
    patches = MUTANTS[name].patches()
    before = [where.__dict__[attribute] for where, attribute, _ in patches]
    with planted(name):
        assert all(
            where.__dict__[attribute] is not right
            for (where, attribute, _), right in zip(patches, before, strict=True)
        )
    assert [where.__dict__[attribute] for where, attribute, _ in patches] == before


def test_without_a_name_nothing_is_planted() -> None:
    right = ServerSession.is_gone
    with planted(""):
        assert ServerSession.is_gone is right


def test_it_is_removed_when_the_run_fails() -> None:
    right = ServerSession.is_gone
    with pytest.raises(ValueError), planted("free-on-timeout"):
        raise ValueError
    assert ServerSession.is_gone is right
