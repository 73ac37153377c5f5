"""Garbage in the log or the header: recovery never raises anything but TierError, and never serves
a block with wrong bytes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from disk_life import DATA, LOG, SHAPES, SLAB, SimulatedFile, commit, plan_store, store, verify

from kvkeep.errors import TierError
from kvkeep.store.layouts import Layout
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.disk_log import FRAME_ALIGN, Frame, frame, read_frames
from kvkeep.units import MIB
from kvkeep_lab.simulation.store_integrity import check_integrity

Chain = tuple[str, Layout, bytes]
_HEAD_BYTES = 40


class Tier:
    """Some chains, a clear and a half-used log, on files whose bytes can be changed."""

    def __init__(self) -> None:
        self.data, self.logs = SimulatedFile(DATA), (SimulatedFile(LOG), SimulatedFile(LOG))
        files = DiskFiles(self.data, self.logs, SLAB)
        files.begin()
        index, random = DiskIndex(DATA, SLAB, None, files.recovered()), Random(7)
        self.chains: list[Chain] = []
        for number in range(6):
            tenant, shape, keys = "ab"[number % 2], SHAPES[number % 3], random.randbytes(16 * 4)
            store(files, index, tenant, shape, b"", keys)
            self.chains.append((tenant, shape, keys))
            if number == 2:
                files.compact()
            if number == 3:
                index.clear("a")
                plan = plan_store(index, "a", shape, b"", random.randbytes(16))
                assert plan is not None
                commit(files, plan.record)

    def recover(self, log: int, changed: bytearray) -> int:
        """How many blocks are found if this is the log."""
        logs = [SimulatedFile(LOG), SimulatedFile(LOG)]
        for number, file in enumerate(logs):
            file.seen = changed if number == log else bytearray(self.logs[number].seen)
        files = DiskFiles(self.data, (logs[0], logs[1]), SLAB)
        if files.is_new:
            files.begin()
        index, found = DiskIndex(DATA, SLAB, None, files.recovered()), 0
        check_integrity(index.store)
        for tenant, shape, keys in self.chains:
            if hit := index.find(tenant, shape, keys, 0, 0):
                found += sum(verify(files, hit, tenant, shape, keys))
                index.release(hit.number, 0)
        files.compact()
        return found


@pytest.fixture(scope="module")
def tier() -> Tier:
    return Tier()


def used(log: bytearray) -> int:
    """Bytes up to the end of the last frame."""
    return -(-len(log.rstrip(b"\0")) // FRAME_ALIGN) * FRAME_ALIGN


def frames_of(log: bytearray) -> list[Frame]:
    return list(read_frames(lambda at, nbytes: memoryview(log[at : at + nbytes]), LOG))


def test_unchanged_it_is_found(tier: Tier) -> None:
    assert tier.recover(0, bytearray(tier.logs[0].seen)) == 16


@pytest.mark.parametrize("log", [0, 1])
def test_any_byte_of_the_log(tier: Tier, log: int, request: pytest.FixtureRequest) -> None:
    random, whole = Random(log), tier.logs[log].seen
    rounds = 6000 if request.config.getoption("--tier") == "nightly" else 60
    heads = [at for at in range(used(whole)) if at % FRAME_ALIGN < _HEAD_BYTES]
    for at in random.sample(heads, min(rounds, len(heads))) + random.sample(
        range(used(whole)), rounds
    ):
        changed = bytearray(whole)
        changed[at] ^= random.randint(1, 255)
        assert tier.recover(log, changed) <= 20, f"byte {at}"


@pytest.mark.parametrize("log", [0, 1])
def test_frames_lost_moved_and_repeated(tier: Tier, log: int) -> None:
    random, whole = Random(log), tier.logs[log].seen
    frames = [bytes(whole[at : at + FRAME_ALIGN]) for at in range(0, used(whole), FRAME_ALIGN)]
    for _ in range(20):
        some = [random.choice([*frames, bytes(FRAME_ALIGN)]) for _ in range(len(frames) + 1)]
        keep = random.randrange(len(frames))
        changed = bytearray(b"".join(frames[:keep] + some)[:LOG])
        tier.recover(log, changed + bytes(LOG - len(changed)))


def test_records_that_no_server_wrote(tier: Tier, request: pytest.FixtureRequest) -> None:
    """Their checksums are right, so only what they say can be checked."""
    frames = max((frames_of(log.seen) for log in tier.logs), key=lambda each: each[0].sequence)
    current = [frames_of(log.seen) == frames for log in tier.logs].index(True)
    rounds = 2000 if request.config.getoption("--tier") == "nightly" else 100
    for seed in range(rounds):
        random, log, before = Random(seed), bytearray(), frames[0].sequence
        for each in frames:
            records = bytearray(each.records)
            for _ in range(random.choice((0, 0, 1, 3))):
                at = random.randrange(len(records))
                records[at : at + random.randint(1, 8)] = random.randbytes(random.randint(0, 8))
            data, before = frame(bytes(records), each.flags, each.sequence, before)
            log += data
        assert tier.recover(current, log + bytes(LOG - len(log))) <= 20


def test_any_byte_of_the_header(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "tier"
    DiskFiles.open(directory, 8 * MIB, MIB).close()
    header = (directory / "header").read_bytes()
    for at in range(len(header)):
        changed = bytearray(header)
        changed[at] ^= 1 << at % 8
        (directory / "header").write_bytes(changed)
        DiskFiles.open(directory, 8 * MIB, MIB).close()
        assert "its header is damaged" in caplog.text
        assert (directory / "header").read_bytes() == header
        caplog.clear()
    (directory / "header").unlink()
    (directory / "header").mkdir()
    with pytest.raises(TierError, match="cannot use"):
        DiskFiles.open(directory, 8 * MIB, MIB)
