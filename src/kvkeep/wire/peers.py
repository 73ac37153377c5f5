"""Which users of this host are trusted with the pool and on a socket: ourselves, root, and those
named on purpose."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from pathlib import Path
from typing import Final

USERS_FORMAT: Final = 'user ids or names with commas between, such as 1000,vllm, or "none"'
_LARGEST_UID: Final = (1 << 32) - 2  # the one above means "no user" to the kernel


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


# What the kernel shows in place of every user that our user namespace does not map: it may be
# anybody.
OVERFLOW_UID: Final = _overflow_uid()


def is_trusted(uid: int, trusted: Collection[int]) -> bool:
    """Whether a file or a process of this user is as good as our own: ours, root's, or one of
    `trusted`. The overflow uid stands for any user that cannot be mapped, so it is trusted only
    where it is our own and every user is mapped."""
    if uid == OVERFLOW_UID:
        return uid == os.geteuid() and _maps_every_user()
    return uid in (0, os.geteuid()) or uid in trusted


def _maps_every_user() -> bool:
    """Whether each user has an id of its own in our user namespace, as in that of the host."""
    try:
        ranges = Path("/proc/self/uid_map").read_text().splitlines()
        return sum(int(line.split()[2]) for line in ranges) > _LARGEST_UID
    except OSError:
        return False


def remedy(uid: int) -> str:
    """What to do where this user should have been trusted."""
    if uid == OVERFLOW_UID:
        return (
            f"uid {uid} stands for a user that this user namespace does not map: run both sides in one user namespace, "
            "or map that user into this one and name it in trusted_users"
        )
    return f"run both sides as one user, or name {uid} in trusted_users if that user is meant"


def parse_users(text: str) -> tuple[int, ...]:
    """The ids of users given by id or name. ValueError for an unknown name, and for the overflow
    uid, which cannot be trusted."""
    names = (
        [] if text.strip().lower() in ("", "none") else [name.strip() for name in text.split(",")]
    )
    users = tuple(dict.fromkeys(map(_uid, names)))
    if OVERFLOW_UID in users:
        raise ValueError(
            f"{OVERFLOW_UID} is the kernel's overflow uid, which stands for every user that is not mapped"
        )
    return users


def _uid(name: str) -> int:
    if name.isascii() and name.isdigit():
        if (uid := int(name)) > _LARGEST_UID:
            raise ValueError(f"{uid} is not a user id")
        return uid
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise ValueError(f"there is no user {name!r}") from error
