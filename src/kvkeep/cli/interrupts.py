"""Ctrl-C as a fact that a command looks at between its steps, not as an exception inside one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside the block, Ctrl-C only notes that it was pressed: it cannot fall between a request to
    the server and the reply that says what has begun. The function that the block gets tells
    whether it was. Pressed again, it raises KeyboardInterrupt as usual, for a server that does not
    answer. For the main thread."""
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
