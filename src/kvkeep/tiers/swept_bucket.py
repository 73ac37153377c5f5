"""A bucket, as `Sweeper` sees it. Notes are replaced on condition that they are as they were, so one
host has a turn at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from kvkeep.errors import TierError
from kvkeep.tiers.sweeper import MOST_NOTE_BYTES, Note, Stored

BLOCKS = "v1"
_CONTROL = "v1/control/"
_HINT = "look at the service, its permissions and the network between"
_CERTIFICATE = re.compile(r"\bInvalidCertificate\(\s*(\w+)")  # in the library's text
_KEYS_A_LIST = 1000  # what a service returns at most


class SweptBucket:
    recount_s = 3600.0

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def stored(self) -> Iterator[Stored]:
        for each in self._all(BLOCKS):
            if not each["path"].startswith(_CONTROL):
                yield Stored(each["last_modified"].timestamp(), each["size"], each["path"])

    def lists(self, prefix: str) -> Iterator[Sequence[Any]]:
        """What is in the bucket below a prefix, in steps."""
        return iter(obstore.list(self._store, prefix, chunk_size=_KEYS_A_LIST))

    def remove(self, blocks: Sequence[Stored]) -> None:
        with as_tier_errors():
            obstore.delete(self._store, [each.path for each in blocks])

    def note(self, name: str) -> Note | None:
        with as_tier_errors():
            try:
                found = obstore.get(self._store, name, options={"range": (0, MOST_NOTE_BYTES)})
            except FileNotFoundError:
                return None
            return _note(found.meta, bytes(found.bytes()))

    def notes(self, folder: str) -> dict[str, Note]:
        return {each["path"].rpartition("/")[2]: _note(each) for each in self._all(folder)}

    def put_note(self, name: str, content: bytes, over: Note | None) -> bool:
        mode: Any = {"e_tag": over.version} if over else "create"
        with as_tier_errors():
            try:
                obstore.put(self._store, name, content, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def remove_note(self, name: str) -> None:
        with as_tier_errors():
            obstore.delete(self._store, [name])

    def tidy(self, now_s: float) -> None:
        pass  # an object is written whole or not at all

    def _all(self, prefix: str) -> Iterator[Any]:
        with as_tier_errors():
            for some in self.lists(prefix):
                yield from some


def _note(meta: Any, content: bytes = b"") -> Note:
    return Note(meta["e_tag"] or "", meta["last_modified"].timestamp(), content)


@contextmanager
def as_tier_errors() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        # The library's text goes on with the whole answer, and may quote the request.
        text = str(error).partition("\n")[0][:300]
        if refused := _CERTIFICATE.search(str(error)):
            raise TierError(
                f"the object store failed: its certificate was refused: {refused[1]}",
                "?ca= names the file with the authority that has signed it",
            ) from error
        raise TierError(f"the object store failed: {text}", _HINT) from error
