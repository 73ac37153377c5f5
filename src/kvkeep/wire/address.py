"""Where a server listens and engines find it, as text: `tcp://host:port` or `ipc://` and a path."""

from __future__ import annotations

import re
from typing import Final

MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of a Unix socket, less its terminator
ADDRESS_FORMAT: Final = f"tcp://host:port, or ipc:// and an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes"


def parse_address(text: str) -> str:
    """The address as it is. ValueError for what is none."""
    scheme, _, rest = text.partition("://")
    if scheme == "tcp":
        split_host(rest)
        return text
    if (
        not rest.isprintable()
        or scheme != "ipc"
        or rest[:1] not in ("/", "@")
        or len(rest.encode()) > MAX_SOCKET_PATH_BYTES
    ):
        raise ValueError
    return text


def split_host(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. ValueError unless both are there."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ValueError
    return match[1].strip("[]"), int(match[2])
