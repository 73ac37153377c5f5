"""A subject causes a bounded number of log lines a minute."""

from __future__ import annotations

from kvkeep.server.line_limit import MOST_SUBJECTS, LineLimit


def test_each_subject_has_its_lines_every_minute() -> None:
    limit = LineLimit(2)
    assert [limit.allows("a", 0.0) for _ in range(4)] == [True, True, False, False]
    assert limit.allows("b", 1.0), "another subject has lines of its own"
    assert not limit.allows("a", 59.0)
    assert [limit.allows("a", 60.0) for _ in range(3)] == [True, True, False]


def test_a_clock_that_was_set_back_begins_a_new_minute() -> None:
    limit = LineLimit(1)
    assert limit.allows("a", 1_000.0) and not limit.allows("a", 1_001.0)
    assert limit.allows("a", 5.0)


def test_ever_new_subjects_take_bounded_memory_and_lines() -> None:
    limit = LineLimit(1)
    assert sum(limit.allows(number, 0.0) for number in range(3 * MOST_SUBJECTS)) == MOST_SUBJECTS
    assert len(limit._minutes) == MOST_SUBJECTS
    assert limit.allows("later", 60.0)
    assert len(limit._minutes) == 1, "subjects of an earlier minute are forgotten"
