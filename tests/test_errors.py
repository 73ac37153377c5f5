"""The tree of errors: drawn as it is, and each with its remedy."""

from __future__ import annotations

import re

from kvkeep import errors
from kvkeep.errors import KVKeepError, PoolError, UntrustedPool


def classes_below(parent: type) -> set[type]:
    return {parent}.union(
        *(
            classes_below(child)
            for child in parent.__subclasses__()
            if child.__module__ == errors.__name__
        )
    )


def test_the_tree_in_the_docstring_names_every_class() -> None:
    drawn = re.findall(r"^[ │├└─]+([A-Z]\w+)", str(errors.__doc__), flags=re.MULTILINE)
    assert set(drawn) == {each.__name__ for each in classes_below(KVKeepError)} and len(
        drawn
    ) == len(set(drawn))


def test_an_error_shows_its_hint_on_a_line_of_its_own() -> None:
    assert str(PoolError("it is gone", "make another")) == "it is gone\nhint: make another"
    assert str(PoolError("it is gone")) == "it is gone"


def test_who_handles_a_pool_that_cannot_be_used_handles_one_that_is_not_trusted() -> None:
    assert issubclass(UntrustedPool, PoolError)
