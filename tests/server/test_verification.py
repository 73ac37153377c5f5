"""The check of one disk: its states. How a server does it is in tests/cli/test_verify.py."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.server.verification import Verification
from kvkeep.store.layouts import Layout
from kvkeep.tiers.disk_check import DiskCheck
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.mover import Result
from kvkeep.units import MIB


@pytest.fixture
def index() -> DiskIndex:
    """Of a disk with four blocks of the tenant `a`."""
    made = DiskIndex(16 * MIB, MIB)
    keys, checks = bytes(range(64)), np.ones((4, 1), np.uint64)
    plan = made.plan_write("a", Layout(0, b"f", (4096,)), b"", keys, checks, 0)
    assert plan is not None
    made.wrote(plan.number, 0)
    return made


def test_it_is_done_when_all_blocks_were_checked(index: DiskIndex) -> None:
    verification = Verification("/disk", DiskCheck(index))
    assert verification.may_check and verification.next(1, MIB) is not None
    assert not verification.may_check  # one job at a time
    assert verification.ended(Result(1, good=bytes([1, 1, 0, 1])), 0) == {"a": 1}
    assert verification.next(2, MIB) is None and not verification.is_running
    shown = verification.shown()
    assert (shown.state, shown.blocks, shown.bad_by_tenant) == ("done", 4, {"a": 1})
    assert len(index.store.blocks.table) == 2  # the bad one and what hung on it are dropped


def test_what_is_under_way_counts_after_it_was_cancelled(index: DiskIndex) -> None:
    verification = Verification("/disk", DiskCheck(index))
    assert verification.next(1, MIB) is not None
    verification.cancel()
    verification.fail("too late")
    assert not verification.may_check
    verification.ended(Result(1, good=bytes([0, 1, 1, 1])), 0)
    shown = verification.shown()
    assert (shown.state, shown.problem, shown.bad_blocks) == ("cancelled", "", 1)
    assert not len(index.store.blocks.table)


def test_a_disk_that_is_used_no_more_fails_it(index: DiskIndex) -> None:
    verification = Verification("/disk", DiskCheck(index))
    verification.fail("a job took more than 10 s")
    assert verification.shown().state == "failed"
    assert verification.shown().problem == "a job took more than 10 s"
