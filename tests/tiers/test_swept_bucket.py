"""A bucket that is kept within its size, with moto's server and several hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from obstore.store import S3Store
from services import Service, free_port, program

from kvkeep.testing.clock import eventually
from kvkeep.testing.tiers import PLACE
from kvkeep.tiers import swept_bucket
from kvkeep.tiers.s3 import S3Tier
from kvkeep.tiers.sweeper import Sweeper
from kvkeep.tiers.swept_bucket import SweptBucket
from kvkeep.tiers.tier import Part

BLOCK = 10_000
SIZE = 100 * BLOCK


class Bucket:
    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        client = boto3.resource("s3", endpoint_url=self.endpoint, region_name="us-east-1")
        self.as_seen: Any = client.create_bucket(Bucket="blocks")

    def store(self) -> S3Store:
        options: dict[str, Any] = {"allow_http": True}
        return S3Store(
            "blocks",
            prefix="kv",
            client_options=options,  # type: ignore[arg-type]
            endpoint=self.endpoint,
            region="us-east-1",
        )

    def tier(self) -> S3Tier:
        return S3Tier(self.store(), SIZE)

    def sizes(self) -> list[int]:
        """Of all blocks, as another program sees them."""
        return [each.size for each in self.as_seen.objects.filter(Prefix=f"kv/{PLACE}/")]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "word")
    port = free_port()
    command = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with Service(command, tmp_path / "server", port):
        yield Bucket(port)


_SLOW_SWEEP = """
import sys
import time
from test_swept_bucket import SIZE, Bucket, Sweeper, SweptBucket
from kvkeep.tiers import sweeper

sweeper._AT_ONCE = 1
bucket = object.__new__(Bucket)
bucket.endpoint = sys.argv[1]
swept = SweptBucket(bucket.store())
remove = swept.remove

def slowly(blocks):
    remove(blocks)
    print("removed", flush=True)
    time.sleep(1)

swept.remove = slowly
Sweeper(swept, SIZE).turn()
"""


def write(tier: S3Tier, blocks: int) -> int:
    """How many of that many new blocks were taken."""
    names = [f"{PLACE}/{os.urandom(16).hex()}" for _ in range(blocks)]
    return sum(tier.write([Part(name, [memoryview(os.urandom(BLOCK))]) for name in names]))


def test_a_note_is_replaced_only_as_it_was_read(bucket: Bucket) -> None:
    one = SweptBucket(bucket.store())
    assert one.note("sweep/lease") is None and not one.notes("sweep")
    assert one.put_note("sweep/lease", b"one", None)
    assert not one.put_note("sweep/lease", b"two", None)
    first = one.note("sweep/lease")
    assert first is not None and first.content == b"one"
    with ThreadPoolExecutor(8) as pool:
        put = lambda number: one.put_note("sweep/lease", b"two%d" % number, first)  # noqa: E731
        assert sum(pool.map(put, range(8))) == 1, "one of several hosts succeeds"
    assert one.notes("sweep")["lease"].version != first.version
    one.remove_note("sweep/lease")
    assert one.note("sweep/lease") is None


def test_blocks_of_all_lists_are_swept_and_what_hosts_tell_each_other_is_not(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swept_bucket, "_KEYS_A_LIST", 7)
    with closing(bucket.tier()) as tier:
        control = Part("v1/control/clears/1", [memoryview(bytes(BLOCK))])
        assert tier.write([control]) == [True]
        assert write(tier, 98) == 98
        assert tier.sweeper.turn()
        assert len(bucket.sizes()) == 90 and tier.usage().blocks == 90
        assert tier.leading([control.name]) == 1


def test_two_hosts_write_more_than_fits_and_use_stays_bounded(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host writes at most what it counts itself beyond what it knows of the other: here a turn
    after every 3 blocks, so at most 6 blocks too many."""
    with closing(bucket.tier()) as one, closing(bucket.tier()) as two:
        most, refused = 0, 0
        for _ in range(25):
            for tier in (one, two):
                refused += 3 - write(tier, 3)
                tier.sweeper.turn()
                most = max(most, sum(bucket.sizes()))
        assert SIZE * 0.9 <= most <= SIZE + 6 * BLOCK
        assert 150 - refused > 110, "there is always room again"


def test_a_sweeper_that_is_killed_in_the_middle_is_followed_by_another(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(bucket.tier()) as tier:
        assert write(tier, 100) == 100
        with subprocess.Popen(
            [sys.executable, "-c", _SLOW_SWEEP, bucket.endpoint],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdout is not None and other.stdout.readline()
            other.send_signal(signal.SIGKILL)
        left = len(bucket.sizes())
        assert 90 < left < 100
        now_s = [0.0]
        with ExitStack() as stack:
            successor = Sweeper(SweptBucket(bucket.store()), SIZE, clock=lambda: now_s[0])
            stack.callback(successor.stop)
            while not successor.turn():
                now_s[0] += 10
            assert now_s[0] < 60
        assert len(bucket.sizes()) == 90
        assert tier.sweeper.turn() or eventually(lambda: tier.usage().blocks >= 90)
