"""The pool's memory, cut into slots of several sizes.

    pool  |   slab 0: slots of 64 KiB   |   slab 1: slots of 1 MiB   |   slab 2: free   | ...

A slab gets a slot size with its first slot in use and loses it with the last, so models with blocks
of different sizes share one pool without partitions. A slot is named by its byte offset in the
pool."""

from __future__ import annotations

from array import array


class Slabs:
    """Hands out slots and takes them back. Every slot is either handed out or in its slab's list of
    free slots."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._slot_bytes: dict[int, int] = {}  # slab -> its slot size; only slabs that have one
        self._slabs_of: dict[int, int] = {}  # slot size -> slabs that have it
        self._unused: list[int] = []  # slabs without a slot size, next one last
        # slot size -> slab -> free offsets, next one last
        self._partial: dict[int, dict[int, list[int]]] = {}
        self._free_slots: dict[int, int] = {}  # slot size -> free slots in its slabs
        self._closed: dict[int, list[int]] = {}  # slab that gives out no slots -> its free offsets
        self.given: array[int] | None = None  # slots that came back, for a tier that logs them

    @property
    def slabs(self) -> int:
        return len(self._slot_bytes) + len(self._unused)

    @property
    def capacity_bytes(self) -> int:
        return self.slabs * self.slab_bytes

    @property
    def unused_slabs(self) -> int:
        return len(self._unused)

    def sizes(self) -> dict[int, int]:
        """Slot size -> number of slabs that have it."""
        return {size: slabs for size, slabs in self._slabs_of.items() if slabs}

    def size_of(self, slab: int) -> int | None:
        """The slab's slot size; None if it has none."""
        return self._slot_bytes.get(slab)

    def slabs_of_other_sizes(self, slot_bytes: int) -> dict[int, int]:
        """Slab -> its slot size."""
        return {slab: size for slab, size in self._slot_bytes.items() if size != slot_bytes}

    def per_slab(self, slot_bytes: int) -> int:
        return self.slab_bytes // slot_bytes

    def add(self, first: int, count: int) -> None:
        """Adds `count` slabs whose memory is ready, from slab number `first` on."""
        self._unused[:0] = range(first + count - 1, first - 1, -1)

    def is_closed(self, slab: int) -> bool:
        return slab in self._closed

    def close(self, slab: int) -> bool:
        """Stops giving out slots of a slab that has a slot size, until it has lost it or `open`.
        Returns False if it was closed."""
        if slab in self._closed:
            return False
        slot_bytes = self._slot_bytes[slab]
        self._closed[slab] = self._partial[slot_bytes].pop(slab, [])
        self._free_slots[slot_bytes] -= len(self._closed[slab])
        return True

    def open(self, slab: int) -> None:
        """Gives out slots of a closed slab again. Nothing if it is not closed."""
        if free := self._closed.pop(slab, None):
            slot_bytes = self._slot_bytes[slab]
            self._partial[slot_bytes][slab] = free
            self._free_slots[slot_bytes] += len(free)

    def take_over(self, slabs: int, taken: dict[int, tuple[int, list[int]]]) -> None:
        """Adds the first `slabs` slabs. `taken`: slot size and used offsets of each slab in use."""
        for slab, (slot_bytes, offsets) in taken.items():
            handed_out, base = set(offsets), slab * self.slab_bytes
            self._slot_bytes[slab] = slot_bytes
            self._slabs_of[slot_bytes] = self._slabs_of.get(slot_bytes, 0) + 1
            ends = range((self.per_slab(slot_bytes) - 1) * slot_bytes, -1, -slot_bytes)
            free = [base + at for at in ends if base + at not in handed_out]
            if free:
                self._partial.setdefault(slot_bytes, {})[slab] = free
            self._partial.setdefault(slot_bytes, {})
            self._free_slots[slot_bytes] = self._free_slots.get(slot_bytes, 0) + len(free)
        self._unused = [slab for slab in range(slabs - 1, -1, -1) if slab not in taken]

    def available(self, slot_bytes: int) -> int:
        """How many slots of this size can be taken without evicting anything."""
        return self._free_slots.get(slot_bytes, 0) + len(self._unused) * self.per_slab(slot_bytes)

    def take(self, slot_bytes: int, n: int) -> list[int]:
        """Takes exactly n slots, neighbours where possible. The caller has checked `available`."""
        assert self.available(slot_bytes) >= n
        partial = self._partial.setdefault(slot_bytes, {})
        taken: list[int] = []
        while len(taken) < n:
            if not partial:
                self._cut(self._unused.pop(), slot_bytes)
            slab, free = next(iter(partial.items()))
            count = min(n - len(taken), len(free))
            taken.extend(reversed(free[len(free) - count :]))
            del free[len(free) - count :]
            if not free:
                del partial[slab]
        self._free_slots[slot_bytes] = self._free_slots.get(slot_bytes, 0) - n
        return taken

    def give(self, offsets: list[int]) -> None:
        """Takes slots of one size back. A slab without used slots loses its slot size."""
        if self.given is not None:
            self.given.extend(offsets)
        slab_bytes, slot_bytes = self.slab_bytes, self._slot_bytes[offsets[0] // self.slab_bytes]
        partial, per_slab = self._partial[slot_bytes], self.per_slab(slot_bytes)
        start, count = 0, len(offsets)
        while start < count:
            slab, stop = offsets[start] // slab_bytes, start + 1
            begin, end = slab * slab_bytes, (slab + 1) * slab_bytes
            while stop < count and begin <= offsets[stop] < end:  # neighbours mostly come together
                stop += 1
            if slab in self._closed:
                free = self._closed[slab]
            else:
                free = partial.setdefault(slab, [])
                self._free_slots[slot_bytes] += stop - start
            free += offsets[start:stop]
            if len(free) == per_slab:
                self.open(slab)
                del partial[slab], self._slot_bytes[slab]
                self._free_slots[slot_bytes] -= per_slab
                self._slabs_of[slot_bytes] -= 1
                self._unused.append(slab)
            start = stop

    def check_integrity(self, handed_out: dict[int, int]) -> None:
        """Asserts that free and handed-out slots (offset -> slot size) together fill every slab
        exactly."""
        free_total: dict[int, int] = {}
        offsets: dict[int, list[int]] = {slab: [] for slab in self._slot_bytes}
        for slot_bytes, partial in self._partial.items():
            for slab, free in partial.items():
                assert self._slot_bytes[slab] == slot_bytes and free
                offsets[slab].extend(free)
                free_total[slot_bytes] = free_total.get(slot_bytes, 0) + len(free)
        for slab, free in self._closed.items():
            assert slab not in self._partial[self._slot_bytes[slab]]
            offsets[slab].extend(free)
        for offset, slot_bytes in handed_out.items():
            assert self._slot_bytes[offset // self.slab_bytes] == slot_bytes, (
                "a slot outside slabs of its size"
            )
            offsets[offset // self.slab_bytes].append(offset)
        for slab, slot_bytes in self._slot_bytes.items():
            base = slab * self.slab_bytes
            expected = [base + i * slot_bytes for i in range(self.per_slab(slot_bytes))]
            assert sorted(offsets[slab]) == expected, (
                f"slab {slab}: a slot is lost or handed out twice"
            )
        assert {s: n for s, n in self._free_slots.items() if n} == free_total
        assert sum(self.sizes().values()) == len(self._slot_bytes)
        assert all(list(self._slot_bytes.values()).count(s) == n for s, n in self.sizes().items())
        assert not set(self._unused) & set(self._slot_bytes) and len(set(self._unused)) == len(
            self._unused
        )

    def _cut(self, slab: int, slot_bytes: int) -> None:
        per_slab = self.per_slab(slot_bytes)
        base = slab * self.slab_bytes
        self._slot_bytes[slab] = slot_bytes
        self._slabs_of[slot_bytes] = self._slabs_of.get(slot_bytes, 0) + 1
        self._partial[slot_bytes][slab] = list(
            range(base + (per_slab - 1) * slot_bytes, base - 1, -slot_bytes)
        )
        self._free_slots[slot_bytes] = self._free_slots.get(slot_bytes, 0) + per_slab
