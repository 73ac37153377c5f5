"""Blocks in parcels: random prompts that share beginnings against a naive model, hosts that write at
once, and whatever a medium may hold instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from random import Random

import numpy as np
import pytest
from dictionary_medium import Dictionary
from numpy.typing import NDArray
from secret_keys import secret

from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.encryption import Encryption
from kvkeep.tiers.parcels import PARCEL_BYTES, Parcels, blocks_a_parcel
from kvkeep.tiers.tier import Part
from kvkeep.tiers.tier_keys import TierKeys
from kvkeep.units import KIB, MIB

PLACE = "v1/tenant/0/layout"
SHARDS = (700, 324)
BIG = (64 * KIB, 64 * KIB)


class Host:
    """Moves blocks as the process of a tier does: those of a window at a time. The bytes of a block
    begin with its key, and depend on the host that computed it."""

    def __init__(
        self, tier: CheckedTier, number: int, window: int, shards: tuple[int, ...]
    ) -> None:
        self.parcels = Parcels(tier.bare, PLACE, window, shards)
        self.number, self.window, self.shards = number, window, shards

    def found(self, keys: list[bytes], start: int = 0) -> int:
        """What a lookup finds of a prompt. It knows the first `start` blocks, from memory."""
        before = start - start % self.window
        return before + self.parcels.leading(b"".join(keys[before:]))

    def store(self, keys: list[bytes], start: int) -> int:
        """Writes the blocks from `start` on. How many leading ones are there afterwards."""
        for low, high in windows(start, len(keys), self.window):
            blocks = [block_of(key, self.number, self.shards) for key in keys[low:high]]
            good = self.parcels.write(b"".join(keys[low:high]), blocks, sums_of(blocks))
            if good < high - low:
                return low + good
        return len(keys)

    def load(self, keys: list[bytes], start: int = 0) -> int:
        """Reads the blocks from `start` on. How many leading ones are right; none is wrong."""
        for low, high in windows(start, len(keys), self.window):
            before = low - low % self.window
            blocks = [
                [memoryview(bytearray(size)) for size in self.shards] for _ in range(high - low)
            ]
            sums = np.zeros((high - low, len(self.shards)), np.uint64)
            read = self.parcels.read(b"".join(keys[before:high]), low - before, blocks, sums)
            for at in range(read):
                key, shards = keys[low + at], blocks[at]
                assert shards[0][:KEY_BYTES] == key, "the bytes of another block"
                assert sums[at].tolist() == [checksum(shard) for shard in shards]
                assert shards[1] == block_of(key, shards[0][KEY_BYTES], self.shards)[1]
            if read < high - low:
                return low + read
        return len(keys)


def windows(start: int, stop: int, window: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(stop, start - start % window + window)
        yield start, end
        start = end


def block_of(key: bytes, host: int, shards: tuple[int, ...]) -> list[memoryview]:
    noise = blake2b(key + bytes([host])).digest()
    first = (key + bytes([host]) + noise * (shards[0] // 64)).ljust(shards[0], b"\0")[: shards[0]]
    rest = [(noise[at:] + noise * (size // 64 + 1))[:size] for at, size in enumerate(shards[1:])]
    return [memoryview(bytes(shard)) for shard in (first, *rest)]


def sums_of(blocks: list[list[memoryview]]) -> NDArray[np.uint64]:
    return np.array([[checksum(shard) for shard in block] for block in blocks], np.uint64)


def prompt(*parts: tuple[str, int]) -> list[bytes]:
    """The keys of a prompt: each depends on all before it."""
    keys, last = [], b""
    for name, blocks in parts:
        for number in range(blocks):
            last = blake2b(last + f"{name}{number}".encode(), digest_size=KEY_BYTES).digest()
            keys.append(last)
    return keys


def encrypted() -> Encryption:
    keys = TierKeys(bytes.fromhex(secret("log")), (bytes.fromhex(secret("a")),))
    return Encryption(lambda: keys)


def stored_as(tier: CheckedTier, name: str) -> str:
    """What the medium calls it."""
    return name if tier.bare is tier.medium else encrypted().names(name)[0]


def hosts(
    medium: Dictionary, count: int = 2, window: int = 8, shards: tuple[int, ...] = SHARDS
) -> list[Host]:
    return [Host(CheckedTier(medium), number, window, shards) for number in range(count)]


# -- against a naive model


def grown(random: Random, prompts: list[list[bytes]], serial: int) -> list[bytes]:
    """A prompt that shares a beginning of any length with an earlier one."""
    known = random.choice(prompts)
    shared = known[: random.choice([len(known), random.randrange(len(known) + 1)])]
    blocks = random.randrange(1, 30)
    return shared + [
        blake2b(f"{serial} {number}".encode(), digest_size=KEY_BYTES).digest()
        for number in range(blocks)
    ]


@pytest.mark.parametrize("seed", range(15))
def test_what_was_stored_is_found_and_read_wherever_prompts_diverge(seed: int) -> None:
    random = Random(seed)
    medium, window = Dictionary(), random.choice([1, 2, 3, 8, 16])
    everyone = hosts(medium, 3, window)
    stored: set[bytes] = set()
    prompts: list[list[bytes]] = [[]]
    for turn in range(25):
        keys = grown(random, prompts, turn)
        prompts.append(keys)
        there = next((at for at, key in enumerate(keys) if key not in stored), len(keys))
        host = random.choice(everyone)
        start = random.randrange(there + 1)
        assert host.found(keys, start) == there
        assert host.load(keys[:there], start) == there
        assert host.load(keys, start) == there, "more was read than was stored"
        if random.random() < 0.3:  # another host stores another rest at the same time
            other = keys[:there] + grown(random, [keys[there:]], 1000 + turn)
            assert random.choice(everyone).store(other, there) == len(other)
            stored.update(other)
            prompts.append(other)
        keys = keys[: random.randrange(there, len(keys)) + 1]  # as far as it was computed
        assert host.store(keys, there) == len(keys)
        stored.update(keys)
    for keys in prompts:
        there = next((at for at, key in enumerate(keys) if key not in stored), len(keys))
        assert everyone[0].found(keys) == everyone[0].load(keys) == there


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_nothing_wrong_is_read_whatever_happens_to_objects(seed: int, is_encrypted: bool) -> None:
    random = Random(seed)
    medium = Dictionary()
    tier = CheckedTier(medium, encrypted() if is_encrypted else None)
    host = Host(tier, 7, 8, SHARDS)
    prompts = [prompt(("a", 20), (f"b{number}", random.randrange(1, 20))) for number in range(4)]
    for turn in range(30):
        keys = random.choice(prompts)
        there = host.load(keys, min(random.randrange(10), host.found(keys)))
        assert there <= len(keys)
        if random.random() < 0.7:
            host.store(keys, there)
        if medium.values and turn % 3 == 0:
            name, other = (random.choice(list(medium.values)) for _ in range(2))
            data = medium.values[name] or b"empty"
            at = random.randrange(len(data))
            flipped = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
            garbage = [b"", flipped, data[: len(data) // 2], b"\xa5" * 300, medium.values[other]]
            medium.values[name] = random.choice(garbage)
    for keys in prompts:
        for _ in range(6):  # a try for each damaged object of its way
            there = host.load(keys)
            host.store(keys, there - there % 8)
        assert host.load(keys) == len(keys), "damage stays in the way"


# -- what an object holds


def test_blocks_that_diverge_or_go_on_begin_a_parcel_of_their_own() -> None:
    medium = Dictionary()
    one, two = hosts(medium)
    first = prompt(("a", 10))
    one.store(first, 0)
    assert len(medium.values) == 2
    second = prompt(("a", 3), ("b", 6))
    assert two.found(second) == 3
    two.store(second, 3)
    assert len(medium.values) == 4
    longer = prompt(("a", 12))
    one.store(longer, 10)
    assert [one.load(each) for each in (first, second, longer)] == [10, 9, 12]
    names = {f"{PLACE}/parcels2-8/{key.hex()}" for key in (first[0], first[8], longer[10])}
    assert set(medium.values) == names | {
        f"{PLACE}/parcels2-8/{key.hex()}" for key in (second[3], second[8])
    }


def test_the_second_of_two_hosts_with_the_same_start_keeps_its_rest() -> None:
    medium = Dictionary()
    one, two = hosts(medium)
    mine, theirs = prompt(("a", 5), ("b", 3)), prompt(("a", 5), ("c", 3))
    assert one.found(mine) == two.found(theirs) == 0, "neither knows of the other"
    assert one.store(mine, 0) == two.store(theirs, 0) == 8
    before = dict(medium.values)
    assert one.store(mine, 0) == 8 and medium.values == before, "nothing is replaced"
    assert [host.load(keys) for host in (one, two) for keys in (mine, theirs)] == [8] * 4


class Counting(Dictionary):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def read(self, parts: list[Part]) -> list[int]:  # type: ignore[override]
        found = super().read(parts)
        self.calls.append(found)
        return found


def test_a_window_is_read_in_one_call_and_its_end_as_a_range() -> None:
    medium = Counting()
    (host,) = hosts(medium, 1, window=32, shards=BIG)
    keys = prompt(("a", 32))
    host.store(keys, 0)
    (size,) = map(len, medium.values.values())
    medium.calls.clear()
    assert host.load(keys) == 32
    assert medium.calls == [[size]]
    medium.calls.clear()
    assert host.load(keys, 30) == 32
    (found,) = medium.calls
    assert len(found) == 2, "header and range, side by side"
    assert sum(found) < 2 * sum(BIG) + 2000
    medium.calls.clear()
    assert host.found(keys) == 32
    assert medium.calls == [[24 + 32 * KEY_BYTES]], "the keys, once"


def test_a_damaged_part_costs_the_parcel_and_what_hangs_below_it_only() -> None:
    medium = Dictionary()
    (host,) = hosts(medium, 1, shards=BIG)
    keys = prompt(("a", 24))
    host.store(keys, 0)
    name = f"{PLACE}/parcels2-8/{keys[8].hex()}"
    data = bytearray(medium.values[name])
    data[-1] ^= 1
    medium.values[name] = bytes(data)
    assert host.found(keys) == 24, "the header says so"
    assert host.load(keys) == 15, "those before it are right"
    assert name not in medium.values and host.found(keys[:16]) == 8
    assert host.store(keys[:16], 8) == 16
    assert host.load(keys) == 24


HEADER = 24 + 8 * KEY_BYTES + 8 * 8 * len(SHARDS)
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], int]] = {  # and how many blocks are right
    "another magic": (lambda data: b"x" + data[1:], 0),
    "another count": (lambda data: data[:6] + b"\7" + data[7:], 0),
    "another proof of keys": (lambda data: data[:8] + bytes(8) + data[16:], 0),
    "another proof of rows": (lambda data: data[:16] + bytes(8) + data[24:], 0),
    "another key": (lambda data: data[:40] + bytes(KEY_BYTES) + data[56:], 0),
    "another row": (lambda data: data[: HEADER - 8] + bytes(8) + data[HEADER:], 0),
    "another block": (lambda data: data[:-5] + b"wrong", 7),
    "cut off in the header": (lambda data: data[: HEADER - 1], 0),
    "cut off behind the header": (lambda data: data[:HEADER], 0),
    "cut off in a block": (lambda data: data[: HEADER + 3 * sum(SHARDS) + 5], 3),
    "nothing": (lambda data: b"", 0),
    "zeros": (lambda data: bytes(len(data)), 0),
}


UNSEEN = {
    *("another proof of rows", "another row", "another block"),
    *("cut off in the header", "cut off behind the header", "cut off in a block"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_removed_when_it_is_read_and_a_write_repairs_it(damage: str) -> None:
    medium = Dictionary()
    (host,) = hosts(medium, 1)
    keys = prompt(("a", 8))
    host.store(keys, 0)
    change, right = DAMAGE[damage]
    (name,), (data,) = medium.values, medium.values.values()
    medium.values[name] = change(data)
    assert host.load(keys) == right and not medium.values
    assert host.store(keys, 0) == host.load(keys) == 8
    medium.values[name] = change(data)
    is_seen = damage not in UNSEEN  # by a lookup, and by a write
    assert host.found(keys) == (0 if is_seen else 8)
    assert host.store(keys, 0) == 8
    assert host.load(keys) == (8 if is_seen else right)


def test_blocks_and_rows_of_another_parcel_are_not_taken_for_those_of_its_keys() -> None:
    medium = Dictionary()
    (host,) = hosts(medium, 1)
    mine, theirs = prompt(("a", 8)), prompt(("b", 8))
    host.store(mine, 0)
    ((name, data),) = medium.values.items()
    host.store(theirs, 0)
    (other,) = set(medium.values) - {name}
    medium.values[name] = data[: 24 + 8 * KEY_BYTES] + medium.values[other][24 + 8 * KEY_BYTES :]
    assert host.found(mine) == 8 and host.load(mine) == 0
    assert name not in medium.values


def test_a_parcel_under_anothers_name_is_a_miss_and_removed() -> None:
    medium = Dictionary()
    (host,) = hosts(medium, 1)
    mine, theirs = prompt(("a", 8)), prompt(("b", 8))
    host.store(mine, 0)
    ((name, data),) = medium.values.items()
    host.store(theirs, 0)
    (other,) = set(medium.values) - {name}
    medium.values[other] = data
    assert host.found(theirs) == 0 and other not in medium.values
    assert host.load(mine) == 8


def _change_parcel(tier: CheckedTier, medium: Dictionary, name: str) -> None:
    """Puts a parcel of another version there, in good frames if there are any."""
    view = memoryview(bytearray(1 << 16))
    (found,) = tier.bare.read([Part(name, [view])])
    view[4] ^= 4
    tier.bare.drop([name])
    tier.bare.write([Part(name, [view[:found]])])


def _change_frame(tier: CheckedTier, medium: Dictionary, name: str) -> None:
    value = medium.values[stored_as(tier, name)]
    medium.values[stored_as(tier, name)] = value[:4] + b"\0" + value[5:]


@pytest.mark.parametrize(
    ("is_encrypted", "change"),
    [(False, _change_parcel), (True, _change_parcel), (True, _change_frame)],
)
def test_what_another_version_wrote_is_a_miss_and_stays(
    is_encrypted: bool, change: Callable[[CheckedTier, Dictionary, str], None]
) -> None:
    medium = Dictionary()
    tier = CheckedTier(medium, encrypted() if is_encrypted else None)
    host = Host(tier, 0, 8, SHARDS)
    keys = prompt(("a", 16))
    host.store(keys, 0)
    name = f"{PLACE}/parcels2-8/{keys[8].hex()}"
    change(tier, medium, name)
    name = stored_as(tier, name)
    before = medium.values[name]
    assert host.found(keys) == host.load(keys) == 8
    host.store(keys, 8)
    assert host.load(keys) == 8, "it is in the way"
    assert medium.values[name] == before


def test_single_blocks_and_parcels_of_another_size_are_missed_and_stay() -> None:
    medium = Dictionary()
    (host,) = hosts(medium, 1)
    keys = prompt(("a", 16))
    tier = CheckedTier(medium)
    tier.write([Part(f"{PLACE}/{key.hex()}", [memoryview(b"one block")]) for key in keys])
    hosts(medium, 1, window=4)[0].store(keys, 0)
    before = dict(medium.values)
    assert host.found(keys) == host.load(keys) == 0
    assert host.store(keys, 0) == host.load(keys) == 16
    assert medium.values.items() > before.items()
    assert tier.leading([f"{PLACE}/{key.hex()}" for key in keys]) == 16


def test_a_forged_parcel_without_encryption_does_not_pass_its_checksums() -> None:
    """A header that promises a block, and bytes of another."""
    medium = Dictionary()
    (host,) = hosts(medium, 1)
    keys, others = prompt(("a", 8)), prompt(("b", 8))
    blocks = [block_of(key, 0, SHARDS) for key in others]
    sums = sums_of([block_of(key, 0, SHARDS) for key in keys])
    host.parcels.write(b"".join(keys), blocks, sums)
    assert host.found(keys) == 8
    assert host.load(keys) == 0


def test_with_encryption_a_parcel_in_anothers_place_or_of_a_host_without_keys_is_a_miss() -> None:
    medium = Dictionary()
    host = Host(CheckedTier(medium, encrypted()), 0, 8, SHARDS)
    mine, theirs = prompt(("a", 8)), prompt(("b", 8))
    host.store(mine, 0)
    (name,) = medium.values
    host.store(theirs, 0)
    (other,) = set(medium.values) - {name}
    assert not any(key.hex() in each for each in medium.values for key in (*mine, *theirs))
    assert not any(key in data for data in medium.values.values() for key in (*mine, *theirs))
    medium.values[name] = medium.values[other]
    assert host.load(mine) == 0 and name not in medium.values
    plain = Dictionary()
    hosts(plain, 1)[0].store(mine, 0)
    (medium.values[name],) = plain.values.values()
    assert host.found(mine) == 0 and name not in medium.values
    assert host.store(mine, 0) == host.load(mine) == 8


def test_a_tier_without_room_keeps_what_it_has() -> None:
    class Full(Dictionary):
        def write(self, parts: list[Part]) -> list[bool]:  # type: ignore[override]
            return [False] * len(parts) if len(self.values) >= 1 else super().write(parts)

    (host,) = hosts(Full(), 1)
    keys = prompt(("a", 16))
    assert host.store(keys, 0) == host.found(keys) == host.load(keys) == 8


@pytest.mark.parametrize(
    ("slot_bytes", "blocks"),
    [(4 * KIB, 128), (64 * KIB, 64), (MIB + 4 * KIB, 3), (3 * MIB, 1), (4 * MIB, 1), (9 * MIB, 1)],
)
def test_a_parcel_has_four_mebibytes_at_most(slot_bytes: int, blocks: int) -> None:
    assert blocks_a_parcel(slot_bytes) == blocks
    assert blocks == 1 or blocks * slot_bytes <= PARCEL_BYTES
