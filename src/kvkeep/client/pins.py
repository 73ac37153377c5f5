"""Maps the server's pool ahead of its use, and lets a GPU reach it, segment by segment: it takes a while, and what is
not done yet can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvkeep.client.connection import Connection

log = logging.getLogger(__name__)

_UNPINNED_S = 0.2  # until a new server's memory is looked at
POOL_REGISTERED = "kvkeep: the server's pool is mapped and registered with the GPU's driver"


def populate(connection: Connection, pin: Any = None, unpin: Any = None) -> bool:
    """Maps a little more of the pool. Whether there was any left."""
    with connection.pool(connection.epoch) as pool:
        return pool is not None and pool[0].populate_next(pin, unpin)


class Pins:
    """For a GPU's copier, and a thread of its own."""

    def __init__(self, connection: Connection, copier: Any) -> None:
        self._connection = connection
        self._copier = copier
        self._told = 0  # in which epoch it was said that all is done

    def run(self, wake: Any, is_closing: Callable[[], bool]) -> None:
        """Until that is so; whoever makes it so notifies `wake`."""
        while not is_closing():
            if not self.go_on():
                with wake:
                    wake.wait_for(is_closing, _UNPINNED_S)

    def go_on(self) -> bool:
        """A little more. Whether there was any left."""
        if populate(self._connection, self._copier.pin, self._copier.unpin):
            return True
        segments, epoch = self._connection.segments, self._connection.epoch
        if segments is not None and segments.is_populated and epoch != self._told:
            self._told = epoch
            log.info(POOL_REGISTERED)
        return False
