"""A cache that answers as the test says, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from kvkeep.client.scheduler import Answer
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.planner import CachePlanner
from kvkeep.kv.keys import KEY_BYTES

BLOCK_TOKENS = 4
PIECES = GroupLayout([CacheGroup("full", BLOCK_TOKENS)])


class ScriptedCache:
    """A LookupSide that has the first `blocks` of every prompt. While `silent`, its answers are on
    their way."""

    def __init__(self) -> None:
        self.blocks = 0
        self.silent = False
        self.surely_lacking: set[bytes] = set()
        self.closed = 0
        self.asked: list[
            tuple[Hashable, str | None, int, int]
        ] = []  # request, salt, number of keys, skip
        self.looked_at: list[Hashable] = []  # requests, each time
        self.released: list[Hashable] = []
        self.loaded_tokens = 0
        self.ended: list[tuple[Hashable, str | None, bytes, bool]] = []

    def lookup(
        self, request: Hashable, salt: str | None, keys: bytes, skip: int = 0
    ) -> Answer | None:
        self.looked_at.append(request)
        question = (request, salt, len(keys) // KEY_BYTES, skip)
        if question not in self.asked:  # asking again is free
            self.asked.append(question)
        if self.silent:
            return None
        blocks = min(self.blocks, len(keys) // KEY_BYTES)
        described = max(0, blocks - skip)
        slots = 1000 + np.arange(skip, skip + described, dtype=np.int64)
        return Answer(blocks, skip, 7, slots, np.arange(described, dtype=np.uint64).reshape(-1, 1))

    def lacks(self, key: bytes) -> bool:
        return key in self.surely_lacking

    def wait(self, request: Hashable, milliseconds: int) -> None:
        """Time does not pass here."""

    def release(self, request: Hashable, loaded_tokens: int = 0) -> None:
        self.released.append(request)
        self.loaded_tokens += loaded_tokens

    def finish_request(
        self, request: Hashable, salt: str | None, last_key: bytes = b"", finished: bool = False
    ) -> None:
        self.ended.append((request, salt, last_key, finished))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def cache() -> Any:
    return ScriptedCache()


@pytest.fixture
def side(cache: ScriptedCache) -> CachePlanner:
    return CachePlanner(cache, PIECES, world_size=1)
