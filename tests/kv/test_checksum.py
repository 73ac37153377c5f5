"""The checksum: pinned values, the C kernel against the readable definition, and what damage it
sees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv import native
from kvkeep.kv.checksum import ABSENT, KEYS, ROW, checksum, checksum_at

MASK = (1 << 64) - 1

# Blocks on disk and in other processes carry these values: a change here is a change of format.
KNOWN = [
    (b"", 0x0000000000000000),
    (b"a", 0xDEFFB121A90F1D3E),
    (b"kvkeep", 0x2D015B9CD6A825E8),
    (bytes(range(256)) * 17, 0xECDF964FAB4C6D18),
    (bytes(4096), 0x694C501109D654C6),
]
SIZES = [
    1, 2, 7, 8, 9, 31, 63, 64, 65, 128, 2048, 4032, 4095, 4096, 4097, 4160, 8191, 8192,
    16384, 20480, 100_003,
]  # fmt: skip


def random_bytes(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def by_definition(data: bytes) -> int:
    """The definition once more, in plain integers and without a thought for speed."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    total = len(data)
    for j in range(0, len(data), ROW):
        row = data[j : j + ROW].ljust(ROW, b"\0")
        value = 0
        for i in range(ROW // 8):
            lo, hi = (
                int.from_bytes(row[8 * i : 8 * i + 4], "little"),
                int.from_bytes(row[8 * i + 4 : 8 * i + 8], "little"),
            )
            a, b = (lo + int(KEYS[2 * i])) % 2**32, (hi + int(KEYS[2 * i + 1])) % 2**32
            value += (a + 1) * (b + 1) - 1
        total += mix64((value + (j // ROW + 1) * 0x9E3779B97F4A7C15) & MASK)
    return mix64(total & MASK)


@pytest.fixture(params=["numpy", *native.INSTRUCTION_SETS])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "numpy":
        monkeypatch.setattr(native, "available", False)
    elif not native.available:
        pytest.skip("the C kernel is not built")
    elif native.use(request.param) != request.param:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    if native.available:
        native.use(native.INSTRUCTION_SETS[-1])


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_answers(road: str, data: bytes, expected: int) -> None:
    assert checksum(data) == expected


@pytest.mark.parametrize("nbytes", SIZES)
def test_both_roads_follow_the_definition(road: str, nbytes: int) -> None:
    data = random_bytes(nbytes, seed=nbytes)
    assert checksum(data) == by_definition(data.tobytes())


def test_alignment_does_not_matter(road: str) -> None:
    data = random_bytes(3 * ROW + 100)
    expected = checksum(data)
    for shift in range(1, 70):
        moved = np.zeros(data.nbytes + shift, dtype=np.uint8)
        moved[shift:] = data
        assert checksum(moved[shift:]) == expected


@pytest.mark.parametrize("value", [0, 0xFF, 0x7F, 0x80])
def test_extreme_words_do_not_overflow_differently(road: str, value: int) -> None:
    data = bytes([value]) * (5 * ROW)
    assert checksum(data) == by_definition(data)


def test_many_areas_at_once(road: str) -> None:
    data = random_bytes(9 * 6000)
    addresses = np.array([data.ctypes.data + 6000 * i for i in (4, 0, 8, 8)], dtype=np.uint64)
    expected = [checksum(data[6000 * i : 6000 * (i + 1)]) for i in (4, 0, 8, 8)]
    assert checksum_at(addresses, 6000).tolist() == expected
    assert checksum_at(addresses, 0).tolist() == [0, 0, 0, 0]
    assert checksum_at(addresses[:0], 6000).tolist() == []


def test_any_buffer_will_do(road: str) -> None:
    array = np.arange(3000, dtype=np.float32).reshape(30, 100)
    expected = checksum(array.tobytes())
    assert checksum(array) == checksum(bytearray(array)) == checksum(memoryview(array)) == expected


def test_scattered_bytes_are_refused() -> None:
    with pytest.raises(RequestError, match="contiguous"):
        checksum(np.zeros((8, 8), dtype=np.uint8)[:, :4])
    with pytest.raises(RequestError, match="-1 bytes"):
        checksum_at(np.zeros(1, dtype=np.uint64), -1)


def test_keys_are_all_different() -> None:
    assert len(set(KEYS.tolist())) == len(KEYS) == 1024


@pytest.mark.parametrize("fill", [None, 0, 0xFF])
def test_every_bit_flip_is_seen(fill: int | None) -> None:
    data = random_bytes(ROW + 72) if fill is None else np.full(1024, fill, dtype=np.uint8)
    sums = {checksum(data)}
    for bit in range(8 * data.nbytes):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 8 * data.nbytes + 1


def test_a_word_set_to_minus_its_key_hides_nothing() -> None:
    """With A * B alone, A = 0 would hide any change of B; with (A + 1)(B + 1) it does not."""
    words = np.zeros(1024, dtype="<u4")
    words[0::2] = -KEYS[0::2]
    before = checksum(words)
    for hi in range(1, 1024, 2):
        words[hi] = 12345
        assert checksum(words) != before
        words[hi] = 0


@pytest.mark.parametrize("width", [1, 2, 4, 8, 64, ROW])
def test_swapped_pieces_are_seen(width: int) -> None:
    data = random_bytes(4 * ROW)
    before = checksum(data)
    pieces = data.reshape(-1, width)
    rng = np.random.default_rng(width)
    for _ in range(300):
        i, j = rng.choice(len(pieces), 2, replace=False)
        if not np.array_equal(pieces[i], pieces[j]):
            pieces[[i, j]] = pieces[[j, i]]
            assert checksum(data) != before
            pieces[[i, j]] = pieces[[j, i]]


def test_length_is_part_of_it() -> None:
    sums = [checksum(bytes(n)) for n in range(2 * ROW + 2)]
    assert len(set(sums)) == len(sums)


def test_what_stands_for_an_absent_shard_is_told_from_all_that_is_there_and_survives_every_form() -> (
    None
):
    """Blocks in other processes carry it: a change here is a change of format."""
    assert ABSENT == MASK
    assert ABSENT != 0, "0 stands for a shard that was stored without a checksum"
    as_sent = np.full(3, ABSENT, dtype=np.uint64).tobytes()
    assert np.frombuffer(as_sent, dtype="<u8").tolist() == [ABSENT] * 3
    assert as_sent == b"\xff" * 24
    shards = [bytes(nbytes) for nbytes in SIZES] + [b"\xff" * nbytes for nbytes in SIZES]
    assert ABSENT not in {checksum(shard) for shard in shards}, (
        "memory that is all zeros or all ones is there"
    )
