from __future__ import annotations

from kvkeep_lab.simulation.given import Given


def test_a_block_belongs_to_the_source_that_the_request_had_it_from_first() -> None:
    given = Given(block_tokens=4)
    given.loaded("r", 2, 3)  # it had 0 and 1 by itself
    assert given.tokens("r", 41) == 12
    given.computed("r", 31)
    given.loaded("r", 0, 9)
    assert given.tokens("r", 41) == 20, "of the second load only the last two blocks were new"


def test_what_is_no_full_block_of_the_prompt_does_not_count() -> None:
    given = Given(block_tokens=4)
    given.loaded("r", 0, 9)
    assert given.tokens("r", 9) == 8
    assert given.tokens("another", 9) == 0
