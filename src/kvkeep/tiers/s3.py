"""An S3-compatible object store as the medium of a tier:
s3://bucket/prefix?endpoint=https://host&region=...&size=10TiB&max_age=30d

A block is one object. A request to an object store takes tens of milliseconds whatever its size, so
requests of one call go out side by side. Objects are created on condition that the name is free:
two hosts that write the same block store it once.

An object store neither evicts nor has a limit: `Sweeper` keeps it within its size and age. The time
of last use is when the object was written; one that is used is now and then written again with the
same bytes. If the bucket keeps versions, so does what was deleted.

Needs the extra `kvkeep[s3]`: only who opens such a tier imports this module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import S3Store

from kvkeep.errors import SettingsError
from kvkeep.tiers.service_address import S3_CREDENTIALS, ServiceAddress, credential
from kvkeep.tiers.sweeper import Sweeper
from kvkeep.tiers.swept_bucket import BLOCKS, SweptBucket, as_tier_errors
from kvkeep.tiers.tier import Part, Usage
from kvkeep.units import MIB, parse_duration, parse_size
from kvkeep.wire.secret_files import read_text

SCHEMES = ("s3",)
OPTIONS = ("endpoint", "region", "size", "max_age", "timeout", "ca")
MOST_BYTES_A_VALUE = 16 * MIB
_REQUESTS = 16  # side by side
_PROBES = 8  # of one step of a search
_MOST_RENEWALS = 8  # under way
_LONGEST_UNRENEWED_S = 86_400.0
_LEAST_UNRENEWED_S = 60.0

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta

_T = TypeVar("_T")
_R = TypeVar("_R")


def open_s3(address: str, sweeps: bool = True) -> S3Tier:
    """SettingsError says what is wrong with the address or the credentials, TierError that the
    bucket cannot be listed. Without credentials of kvkeep's own, those of AWS_* variables, of the
    pod or of the machine are used. Unless it `sweeps`, its sweeper does not run."""
    where = ServiceAddress.parse(address, SCHEMES, OPTIONS, 443)
    endpoint = where.options.get("endpoint", "")
    option = "size"
    try:
        size_bytes = parse_size(where.options.get("size", "0"))
        option = "max_age"
        max_age_s = parse_duration(where.options.get("max_age", "0s"))
    except ValueError as error:
        raise SettingsError(f"the address of an s3:// tier: {option}: expected {error}") from None
    if endpoint and not endpoint.startswith(("https://", "http://")):
        raise SettingsError("the address of an s3:// tier: endpoint: expected https://host")
    options: dict[str, Any] = {
        name: where.options[name] for name in ("endpoint", "region") if name in where.options
    }
    for variable in S3_CREDENTIALS:
        value = credential(variable)
        if value is not None:
            options[variable.removeprefix("KVKEEP_S3_").lower()] = value
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=where.timeout_s),
        "connect_timeout": timedelta(seconds=where.timeout_s),
        "allow_http": endpoint.startswith("http://"),
    }
    if "ca" in where.options:
        client["root_certificate"] = read_text(Path(where.options["ca"]))
    with as_tier_errors():
        store = S3Store(
            where.host,
            prefix=where.path or None,
            client_options=client,  # type: ignore[arg-type]
            retry_config=_once_more(where.timeout_s),
            **options,
        )
        next(SweptBucket(store).lists(BLOCKS), None)  # is the bucket there, and readable?
        tier = S3Tier(store, size_bytes, max_age_s)
        tier.sweeper.look()
    if sweeps:
        threading.Thread(target=tier.sweeper.run, name="kvkeep-sweep", daemon=True).start()
    return tier


def _once_more(timeout_s: float) -> Any:
    """A service may close a connection that is kept for the next request, which then fails at once.
    What has waited for an answer is not asked again."""
    return {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=timeout_s / 2),
        "backoff": {
            "init_backoff": timedelta(milliseconds=10),
            "max_backoff": timedelta(milliseconds=100),
            "base": 2,
        },
    }


class S3Tier:
    best_bytes = 4 * MIB

    def __init__(self, store: S3Store, size_bytes: int = 0, max_age_s: float = 0.0) -> None:
        self._store = store
        self._bucket = SweptBucket(store)
        self.sweeper = Sweeper(self._bucket, size_bytes, max_age_s)
        self._max_age_s = max_age_s
        self._threads = ThreadPoolExecutor(_REQUESTS, "kvkeep-s3")
        self._renewals = threading.BoundedSemaphore(_MOST_RENEWALS)

    @property
    def store(self) -> S3Store:
        """The client library's, for benchmarks."""
        return self._store

    def leading(self, names: Sequence[str]) -> int:
        """By a search with 8 probes at a time, so it may overlook a hole; reading finds it."""
        low, high = 0, len(names)  # the first `low` are there, names[high] is not
        while low < high:
            step = -(-(high - low) // _PROBES)
            at = [min(each, high) - 1 for each in range(low + step, high + step, step)]
            there = self._each(self._is_there, [names[number] for number in at])
            for number, found in zip(at, there, strict=True):
                if not found:
                    high = number
                    break
                low = number + 1
        return low

    def read(self, parts: Sequence[Part]) -> list[int]:
        return self._each(self._read, parts)

    def write(self, parts: Sequence[Part]) -> list[bool]:
        return self._each(self._write, parts)

    def delete(self, prefix: str) -> int:
        count = 0
        with as_tier_errors():
            for some in self._bucket.lists(prefix.rstrip("/")):
                obstore.delete(self._store, [each["path"] for each in some])
                self.sweeper.add(-len(some), -sum(each["size"] for each in some))
                count += len(some)
        return count

    def drop(self, names: Sequence[str]) -> None:
        with as_tier_errors():
            obstore.delete(self._store, list(names))

    def usage(self) -> Usage:
        return self.sweeper.usage()

    def close(self) -> None:
        self.sweeper.stop()
        self._threads.shutdown(cancel_futures=True)

    def _is_there(self, name: str) -> bool:
        return self._length(name) >= 0

    def _length(self, name: str) -> int:
        """-1: there is no such object."""
        with as_tier_errors():
            try:
                return int(obstore.head(self._store, name)["size"])
            except FileNotFoundError:
                return -1

    def _read(self, part: Part) -> int:
        with as_tier_errors():
            try:
                wanted = part.offset, part.offset + max(part.nbytes, 1)
                found = obstore.get(self._store, part.name, options={"range": wanted})
                data = found.bytes()
            except FileNotFoundError:
                return -1
            except GenericError:
                length = self._length(part.name)
                if length > part.offset:
                    raise
                return min(length, 0)  # a range beyond the end
        is_whole = len(data) == found.meta["size"]
        self._renew_later(part.name, found.meta, data if is_whole else None)
        at = 0
        with memoryview(data) as content:
            for view in part.views:
                some = content[at : at + view.nbytes]
                view[: some.nbytes] = some
                at += some.nbytes
        return at

    def _write(self, part: Part) -> bool:
        if part.nbytes > MOST_BYTES_A_VALUE or not self.sweeper.has_room(part.nbytes):
            return False
        data = b"".join(part.views)
        with as_tier_errors():
            try:
                obstore.put(self._store, part.name, data, mode="create")
            except AlreadyExistsError:
                # Its host has stored what follows it, which is of no use without it. What is there
                # may differ from `data`.
                with suppress(FileNotFoundError):
                    self._renew_later(part.name, obstore.head(self._store, part.name), None)
                return True
        self.sweeper.add(1, part.nbytes)
        return True

    def _renew_later(self, name: str, meta: ObjectMeta, data: Bytes | None) -> None:
        """Writes an object again, if it was written long ago and still is as it was. Without its
        bytes, it is read first."""
        unrenewed_s = time.time() - meta["last_modified"].timestamp()
        if meta["size"] > MOST_BYTES_A_VALUE:
            return
        if unrenewed_s > self._renew_after_s() and self._renewals.acquire(blocking=False):
            self._threads.submit(self._renew, name, meta["e_tag"], data)

    def _renew(self, name: str, e_tag: str | None, data: Bytes | None) -> None:
        try:
            if data is None:
                data = obstore.get(self._store, name).bytes()
            obstore.put(self._store, name, data, mode={"e_tag": e_tag})
        except (BaseError, OSError):
            pass  # it is gone, or is renewed when it is used again
        finally:
            self._renewals.release()

    def _renew_after_s(self) -> float:
        """A quarter of the age at which blocks are removed."""
        removed_s = self._max_age_s or _LONGEST_UNRENEWED_S
        removed_s = min(removed_s, self.sweeper.removed_s or removed_s)
        return max(_LEAST_UNRENEWED_S, min(removed_s / 4, _LONGEST_UNRENEWED_S))

    def _each(self, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Side by side. If one fails, its error; the others end first."""
        futures = [self._threads.submit(work, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]
