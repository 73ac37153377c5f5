"""One engine process and a server, without faults but those that each test makes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.chaos.real_engine import Job, RealEngine, Traffic

POOL = (
    "--pool-size",
    "8MiB",
    "--slab-size",
    "256KiB",
    "--session-check-interval",
    "50ms",
    "--no-verify",
)


def job(address: str, *, tp: int = 1, verify: bool = True) -> Job:
    return Job(
        address,
        seed=1,
        number=0,
        life=0,
        tp=tp,
        lookup_deadline_ms=2_000,
        num_blocks=256,
        verify=verify,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL) as running:
        yield running


def test_it_serves_finds_blocks_and_ends_when_told(server: ServerProcess) -> None:
    engine = RealEngine(job(server.address, tp=2))
    assert eventually(lambda: any(answer.external_cached_tokens for answer in engine.answers)), (
        engine.log()
    )
    engine.pause()
    assert engine.paused[-1][1] == float("inf")
    stat = Path(f"/proc/{engine.process.pid}/stat")
    assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    engine.go_on()
    assert engine.paused[-1][1] < float("inf")
    assert engine.finish(60) and not engine.alive and engine.said["checked_bytes"] > 0
    assert all(not each.wrong_tokens and each.finish_reason == "length" for each in engine.answers)
    assert all(each.ttft_ms > 0 and each.plain_ttft_ms > 0 for each in engine.answers)


def test_it_sees_a_wrong_byte(server: ServerProcess) -> None:
    """With verification off on both sides, bits that flip in the pool reach the model: it must say
    so."""
    engine = RealEngine(job(server.address, verify=False))
    try:
        assert eventually(
            lambda: any(answer.external_cached_tokens for answer in engine.answers)
        ), engine.log()
        for path in Path(f"/dev/shm/kvkeep-{server.name}").glob("segment-*"):
            with open(path, "r+b") as file:
                used = len(file.read().rstrip(b"\0"))
                for at in range(100, used, 4096):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 4]))
        assert eventually(lambda: not engine.alive)
        assert "1 flipped bits" in engine.said["wrong_bytes"]
    finally:
        engine.kill()
    assert "WrongBytes" in engine.log() and engine.process.exit_code() == 1


def test_what_a_killed_one_said_counts(server: ServerProcess) -> None:
    engine = RealEngine(job(server.address))
    assert eventually(lambda: len(engine.answers) > 0), engine.log()
    engine.kill()
    assert engine.process.exit_code() == -signal.SIGKILL and engine.answers
    assert not os.path.exists(f"/proc/{engine.process.pid}")


def test_one_that_does_not_end_is_ended(server: ServerProcess) -> None:
    engine = RealEngine(job(server.address))
    assert eventually(lambda: engine.ready), engine.log()
    assert not engine.finish(within_s=0.0) and not engine.alive


def test_engines_share_beginnings_and_have_prompts_of_their_own() -> None:
    first, other = (Traffic(Job("", 1, number, 0, 1, 20, 256, True)) for number in range(2))
    assert first._prefixes == other._prefixes
    ours, theirs = (
        [each for _ in range(20) for each in traffic.next()] for traffic in (first, other)
    )
    assert ours != theirs and len({salt for salt, _ in ours}) > 1
    first.goes_on("bob", [7] * 40)
    later = [each for _ in range(20) for each in first.next()]
    assert any(salt == "bob" and tokens[:40] == [7] * 40 for salt, tokens in later)
    assert all(len(tokens) <= 512 for _, tokens in ours + theirs + later)
