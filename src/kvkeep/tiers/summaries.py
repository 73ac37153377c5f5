"""Which blocks a shared tier surely lacks, by what its hosts publish about what they wrote.

    v1/control/summaries/<host>/<0 or 1>/head    number, and words of the blocks written since `bits`
    v1/control/summaries/<host>/<0 or 1>/bits    a bit for each word of what was written before

A host publishes before it calls blocks written. Every host reads the heads of all others each second,
and bits that have changed, into one map (`Shown`): a block whose bit is 0 was on no host's list when
the map was read last. Objects of a tier are never replaced, so a host writes its two heads in turn,
and removes the older one first: one of them is always there.

The map can be wrong in one way only, and that costs a hit: it does not know what was written less than
a few seconds ago, nor what a host wrote that has written a million blocks since."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.tier import Part

BITS_BYTES: Final = 1 << 20
SHOWN_BYTES: Final = BITS_BYTES + mmap.PAGESIZE
HOLDS_S: Final = 5.0  # after the heads of all hosts were read
_PLACE: Final = "v1/control/summaries"
_HEAD = struct.Struct("<QQI4x")  # its number, that of the bits (0: none), how many words follow
_NUMBER = struct.Struct("<Q")
_MOST_WORDS: Final = 4096
_MOST_HOSTS: Final = 256
_MOST_OF_A_GENERATION: Final = 8 * BITS_BYTES // 16  # bits; two generations are published
_FULL: Final = 8 * BITS_BYTES // 2  # bits of the map: then it is read anew
_MASK: Final = np.uint64(8 * BITS_BYTES - 1)


def words_of(place: str, keys: bytes) -> NDArray[np.uint64]:
    """A word for each key, which also depends on the place."""
    salt = np.frombuffer(blake2b(place.encode(), digest_size=8).digest(), np.uint64)
    return np.frombuffer(keys, np.uint64)[:: KEY_BYTES // 8] ^ salt


class Shown:
    """The map, in memory that the tier's process writes and the server reads."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, SHOWN_BYTES)
        self._as_of = np.frombuffer(memory, np.float64, 1)
        self.bits = np.frombuffer(memory, np.uint8, BITS_BYTES, mmap.PAGESIZE)

    def lacks(self, words: NDArray[np.uint64]) -> bool:
        """Whether the tier surely has none of these blocks. False if that is not known now."""
        is_known = time.monotonic() < float(self._as_of[0]) + HOLDS_S
        return is_known and not _test(self.bits, words).any()

    def set_as_of(self, as_of_s: float) -> None:
        self._as_of[0] = as_of_s

    def clear(self) -> None:
        self.set_as_of(-HOLDS_S)
        self.bits[:] = 0


class Summaries:
    """What this host publishes, and reads of others. For threads of the tier's process."""

    def __init__(self, tier: CheckedTier, host: str, shown: Shown) -> None:
        self._tier = tier
        self._host = host
        self._shown = shown
        self._lock = threading.Lock()  # of what this host has written
        self._publishing = threading.Lock()
        self._bits = np.zeros(BITS_BYTES, np.uint8)
        self._older = np.zeros(BITS_BYTES, np.uint8)  # the generation before
        self._recent: list[NDArray[np.uint64]] = []  # not in the published bits
        self._written, self._published = 1, 0  # the first head is empty
        self._number = self._bits_number = 0
        self._seen: dict[str, tuple[int, int]] = {}  # numbers of a host's head and bits
        shown.clear()
        self._recover()

    def wrote(self, words: NDArray[np.uint64]) -> None:
        """Notes blocks that are on the tier: the next head has them."""
        with self._lock:
            _set(self._bits, words)
            _set(self._shown.bits, words)
            self._recent.append(words)
            self._written += 1

    def found(self, words: NDArray[np.uint64]) -> None:
        """Notes blocks that are on the tier, if no host has."""
        if not _test(self._shown.bits, words).all():
            self.wrote(words)

    def publish(self) -> None:
        """Returns when all that was noted before is published, if the tier has room. One call does it
        for all that wait."""
        with self._lock:
            wanted = self._written
        with self._publishing:
            if self._published >= wanted:
                return
            with self._lock:
                written = self._written
                words = np.concatenate([np.empty(0, np.uint64), *self._recent])
                self._recent = [words]
            if len(words) > _MOST_WORDS:
                if not self._publish_bits():
                    return
                with self._lock:
                    self._recent = self._recent[1:]
                words = np.empty(0, np.uint64)
            head = _HEAD.pack(self._number + 1, self._bits_number, len(words)) + words.tobytes()
            if not self._replace(_name(self._host, self._number + 1, "head"), head):
                return
            self._number += 1
            self._published = written

    def read(self, hosts: Sequence[str], gone: Sequence[str] = ()) -> None:
        """Reads what these hosts, all that use the tier, have published since the last time; and what
        those that are gone had published, as far as it is still there."""
        began_s = time.monotonic()
        with self._lock:
            if _count(self._shown.bits) > _FULL:
                self._seen.clear()
                self._shown.clear()
        is_complete = len(hosts) <= _MOST_HOSTS
        asked = [*hosts, *gone][:_MOST_HOSTS]
        heads = self._heads(asked)
        for host in asked:
            is_taken = host in heads and self._take(host, heads[host])
            is_complete &= is_taken or host in gone
        if self._host not in heads:
            self._published = 0  # the service has evicted it
        if is_complete:
            self._shown.set_as_of(began_s)

    def _take(self, host: str, head: tuple[int, int, NDArray[np.uint64]]) -> bool:
        number, bits_number, words = head
        before = self._seen.get(host, (0, 0))
        if number == before[0]:
            return True
        bits: NDArray[np.uint8] | None = None
        if bits_number and bits_number != before[1]:
            bits = self._read_bits(host, bits_number)
            if bits is None:
                return False
        with self._lock:
            if bits is not None:
                np.bitwise_or(self._shown.bits, bits, out=self._shown.bits)
            _set(self._shown.bits, words)
        self._seen[host] = number, bits_number
        return True

    def _publish_bits(self) -> bool:
        with self._lock:
            content = self._bits | self._older
            if _count(self._bits) > _MOST_OF_A_GENERATION:
                self._older, self._bits = self._bits, np.zeros(BITS_BYTES, np.uint8)
        number = self._bits_number + 1
        packed = _NUMBER.pack(number) + content.tobytes()
        if not self._replace(_name(self._host, number, "bits"), packed):
            return False
        self._bits_number = number
        return True

    def _replace(self, name: str, content: bytes) -> bool:
        """False if the tier has no room."""
        self._tier.drop([name])
        return self._tier.write([Part(name, [memoryview(content)])]) == [True]

    def _heads(self, hosts: Iterable[str]) -> dict[str, tuple[int, int, NDArray[np.uint64]]]:
        """The newer head of each host."""
        views = {
            _name(host, number, "head"): (host, bytearray(_HEAD.size + 8 * _MOST_WORDS))
            for host in hosts
            for number in (0, 1)
        }
        parts = [Part(name, [memoryview(view)]) for name, (_, view) in views.items()]
        heads: dict[str, tuple[int, int, NDArray[np.uint64]]] = {}
        for nbytes, (host, view) in zip(self._tier.read(parts), views.values(), strict=True):
            if nbytes < _HEAD.size:
                continue
            number, bits_number, count = _HEAD.unpack_from(view)
            if nbytes == _HEAD.size + 8 * count and number > heads.get(host, (-1,))[0]:
                words = np.frombuffer(view, np.uint64, count, _HEAD.size)
                heads[host] = number, bits_number, words
        return heads

    def _read_bits(self, host: str, number: int) -> NDArray[np.uint8] | None:
        view = bytearray(_NUMBER.size + BITS_BYTES)
        (nbytes,) = self._tier.read([Part(_name(host, number, "bits"), [memoryview(view)])])
        if nbytes != len(view) or _NUMBER.unpack_from(view) != (number,):
            return None  # another one by now: the next head names it
        return np.frombuffer(view, np.uint8, offset=_NUMBER.size)

    def _recover(self) -> None:
        """Continues what this host published before it was started again."""
        head = self._heads([self._host]).get(self._host)
        if head is not None:
            self._number, self._bits_number, words = head
            bits = self._read_bits(self._host, self._bits_number) if self._bits_number else None
            if bits is not None:
                self._older |= bits
            self.wrote(words)


def _name(host: str, number: int, kind: str) -> str:
    return f"{_PLACE}/{host}/{number % 2}/{kind}"


def _set(bits: NDArray[np.uint8], words: NDArray[np.uint64]) -> None:
    at = (words & _MASK).astype(np.int64)
    np.bitwise_or.at(bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))


def _test(bits: NDArray[np.uint8], words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    at = (words & _MASK).astype(np.int64)
    found: NDArray[np.uint8] = bits[at >> 3] >> (at & 7).astype(np.uint8)
    return found & np.uint8(1)


def _count(bits: NDArray[np.uint8]) -> int:
    return int.from_bytes(bits.tobytes(), "little").bit_count()
