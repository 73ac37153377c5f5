"""Which users of a host are trusted: ourselves, root, and those who were named."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys

import pytest

from kvkeep.wire import peers
from kvkeep.wire.peers import OVERFLOW_UID, is_trusted, parse_users, remedy


@pytest.fixture
def _not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.os, "geteuid", lambda: 1_000)


@pytest.mark.usefixtures("_not_root")
@pytest.mark.parametrize(
    ("uid", "trusted", "expected"),
    [
        (1_000, (), True),
        (0, (), True),
        (1_001, (), False),
        (1_001, (1_001,), True),
        (1_002, (1_001, 1_003), False),
        (OVERFLOW_UID, (), False),
        (OVERFLOW_UID, (OVERFLOW_UID,), False),
    ],
)
def test_our_own_roots_and_those_who_were_named(
    uid: int, trusted: tuple[int, ...], expected: bool
) -> None:
    assert is_trusted(uid, trusted) is expected


@pytest.mark.parametrize("every_user", [True, False])
def test_the_overflow_uid_may_be_our_own_where_it_can_be_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, every_user: bool
) -> None:
    monkeypatch.setattr(peers.os, "geteuid", lambda: OVERFLOW_UID)
    monkeypatch.setattr(peers, "_maps_every_user", lambda: every_user)
    assert is_trusted(OVERFLOW_UID, ()) is every_user


_IN_A_NAMESPACE = """
import os, sys
from kvkeep.wire.peers import OVERFLOW_UID, is_trusted
print(os.geteuid(), is_trusted(os.geteuid(), ()), is_trusted(0, ()), is_trusted(OVERFLOW_UID, ()))
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            (),
            f"{OVERFLOW_UID} False True False",
        ),  # nobody is mapped: all look alike, ourselves among them
        (("--map-root-user",), "0 True True False"),
        (("--map-user", str(OVERFLOW_UID)), f"{OVERFLOW_UID} False True False"),
    ],
)
def test_in_a_user_namespace_the_overflow_uid_may_be_anybody(
    flags: tuple[str, ...], said: str
) -> None:
    command = ["unshare", "--user", *flags, sys.executable, "-c", _IN_A_NAMESPACE]
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--user", *flags, "true"]).returncode
    ):
        pytest.skip("user namespaces cannot be made here")
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == said
    )


def test_what_to_do_depends_on_whether_the_user_is_known_here() -> None:
    assert "name 1234 in trusted_users" in remedy(1234) and "namespace" not in remedy(1234)
    assert "one user namespace" in remedy(OVERFLOW_UID) and "trusted_users" in remedy(OVERFLOW_UID)


def test_the_kernel_says_what_it_shows_for_users_that_it_cannot_map() -> None:
    with open("/proc/sys/kernel/overflowuid") as file:
        assert int(file.read()) == OVERFLOW_UID


@pytest.mark.parametrize(
    ("text", "users"),
    [
        ("", ()),
        ("none", ()),
        (" None ", ()),
        ("7", (7,)),
        ("7, 8,7", (7, 8)),
        ("root", (0,)),
        (f"1234,{pwd.getpwuid(0).pw_name}", (1234, 0)),
        ("4294967294", (4294967294,)),
    ],
)
def test_users_are_read_by_id_or_name(text: str, users: tuple[int, ...]) -> None:
    assert parse_users(text) == users


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "4294967295",
        "1,,2",
        ",",
        "no such user",
        "1.5",
        "0x10",
        "²",
        str(OVERFLOW_UID),
        f"1,{OVERFLOW_UID}",
    ],
)
def test_what_is_no_user_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no user|not a user|stands for every user"):
        parse_users(text)
