"""The tier on an S3-compatible object store, with moto's server: as check_tier() says, and in
faults of the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from services import Relay, Service, free_port, program

from kvkeep.errors import SettingsError, TierError
from kvkeep.testing.clock import eventually
from kvkeep.testing.tiers import PLACE, check_tier
from kvkeep.tiers import swept_bucket
from kvkeep.tiers.checked_tier import SEGMENT_BYTES, CheckedTier
from kvkeep.tiers.s3 import S3Tier, open_s3
from kvkeep.tiers.tier import Part, Tier

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    path = program("moto_server")
    services: list[Service] = []

    def run(port: int = 0, *flags: str) -> Service:
        port = port or free_port()
        command = [path, "-H", "127.0.0.1", "-p", str(port), *flags]
        services.append(Service(command, tmp_path / f"server{len(services)}", port))
        return services[-1]

    yield run
    for service in services:
        service.kill()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_S3_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("KVKEEP_S3_SECRET_ACCESS_KEY", "a-secret-word")


def bucket(port: int, ca: Path | None = None) -> Any:
    """A new bucket, as another program sees it; over TLS if there is an authority."""
    client = boto3.resource(
        "s3",
        endpoint_url=f"{'https' if ca else 'http'}://127.0.0.1:{port}",
        verify=str(ca) if ca else None,
        region_name="us-east-1",
        aws_access_key_id="an-id",
        aws_secret_access_key="a-secret-word",
    )
    return client.create_bucket(Bucket="blocks")


def address(port: int, more: str = "") -> str:
    return f"s3://blocks/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1{more}"


class FaultyServer:
    """Faults of one real server; the tier speaks to it through a relay."""

    def __init__(self, server: Service, relay: Relay) -> None:
        self.server, self.relay = server, relay
        self.bucket = bucket(server.port)
        self.tier: S3Tier | None = None

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        if fault == "stall":
            with self.server.paused():
                yield
        elif fault == "half":
            with self.relay.cutting_after(4500):
                yield
        else:
            assert self.tier is not None
            filler = Part("v1/filler/0/layout/key", [memoryview(bytes((8 << 20) - 15_000))])
            assert self.tier.write([filler]) == [True]
            yield
            assert self.tier.delete("v1/filler/") == 1

    def garble(self) -> None:
        for each in self.bucket.objects.all():
            data = bytearray(each.get()["Body"].read())
            data[90 if len(data) > 90 else 0] ^= 4
            each.put(Body=bytes(data))


def part(name: str, data: bytes) -> Part:
    return Part(f"{PLACE}/{name}", [memoryview(data)])


def read(tier: Tier, name: str, nbytes: int) -> bytes | None:
    view = memoryview(bytearray(nbytes))
    (found,) = tier.read([Part(f"{PLACE}/{name}", [view])])
    return None if found < 0 else view[:found].tobytes()


def test_an_object_store_is_a_tier(start: Start) -> None:
    server = start()
    relay = Relay(server.port)
    faults = FaultyServer(server, relay)

    def make() -> tuple[Tier, FaultyServer]:
        faults.bucket.objects.delete()
        faults.tier = open_s3(address(relay.port, "&timeout=2s&size=8MiB"), sweeps=False)
        return CheckedTier(faults.tier), faults

    with closing(relay):
        check_tier(make)


def test_leading_searches_and_a_hole_that_it_overlooks_is_a_miss(start: Start) -> None:
    server = start()
    bucket(server.port)
    with closing(open_s3(address(server.port, "&timeout=30s"))) as tier:
        names = [f"{PLACE}/{number}" for number in range(100)]
        tier.write([Part(name, [memoryview(b"x")]) for name in names[:73]])
        for count in (1, 7, 8, 9, 64, 72, 73, 74, 80, 100):
            assert tier.leading(names[:count]) == min(count, 73)
        tier.drop([names[3]])
        assert tier.leading(names[:8]) == 3
        found = tier.leading(names)
        assert found in (3, 73)
        view = memoryview(bytearray(1))
        assert tier.read([Part(names[3], [view]), Part(names[4], [view])]) == [-1, 1]


def test_a_server_that_is_killed_or_paused_is_an_error_and_the_next_one_serves(
    start: Start,
) -> None:
    server = start()
    bucket(server.port)
    with closing(CheckedTier(open_s3(address(server.port, "&timeout=2s")))) as tier:
        data = os.urandom(1000)
        assert tier.write([part("a", data)]) == [True]
        usage = tier.usage()
        with server.paused():
            for call in (
                lambda: tier.read([part("a", bytearray(1000))]),
                lambda: tier.write([part("b", bytes(1000))]),
            ):
                with pytest.raises(TierError, match="the object store failed"):
                    call()
        assert read(tier, "a", 1000) == data
        server.kill()
        for call in (
            lambda: tier.read([part("a", bytearray(1000))]),
            lambda: tier.write([part("b", bytes(1000))]),
            lambda: tier.leading([f"{PLACE}/a"]),
            lambda: tier.delete("v1/"),
        ):
            with pytest.raises(TierError, match="the object store failed"):
                call()
        assert tier.usage() == usage
        bucket(start(server.port).port)
        assert read(tier, "a", 1000) is None
        assert tier.write([part("a", data)]) == [True]
        assert read(tier, "a", 1000) == data


def test_what_changed_in_the_bucket_is_a_miss_and_can_be_written_again(start: Start) -> None:
    server = start()
    objects = bucket(server.port)
    with closing(CheckedTier(open_s3(address(server.port, "&timeout=30s")))) as tier:
        data = os.urandom(1000)
        tier.write([part("a", data)])
        (stored,) = [each for each in objects.objects.all() if each.key.endswith("/a")]
        for left in (0, 10, 64, 900):
            assert tier.write([part("a", data)]) == [True]
            stored.put(Body=stored.get()["Body"].read()[:left])
            assert read(tier, "a", 1000) is None, left
            assert tier.leading([f"{PLACE}/a"]) == 0, "what is no block was left in the way"
        tier.write([part("a", data)])
        assert read(tier, "a", 1000) == data


def test_objects_are_deleted_in_steps(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swept_bucket, "_KEYS_A_LIST", 4)
    server = start()
    bucket(server.port)
    with closing(open_s3(address(server.port, "&timeout=30s"), sweeps=False)) as tier:
        names = [f"v1/{tenant}/{number}" for tenant in ("t", "t2") for number in range(11)]
        tier.write([Part(name, [memoryview(bytes(100))]) for name in names])
        assert (tier.usage().blocks, tier.usage().used_bytes) == (22, 2200)
        assert tier.delete("v1/t/") == 11 and tier.leading(names[11:]) == 11
        assert tier.usage().blocks == 11
    with closing(open_s3(address(server.port, "&timeout=30s"))) as other:
        assert eventually(lambda: other.usage().blocks == 11), "what another host has written"


@pytest.mark.parametrize("use", ["read", "read in part", "written again"])
def test_what_is_used_long_after_it_was_written_is_renewed(
    start: Start, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    objects = bucket(server.port)
    with closing(CheckedTier(open_s3(address(server.port, "&timeout=30s&max_age=1h")))) as tier:
        data = os.urandom(SEGMENT_BYTES + 1000)
        tier.write([part("a", data), part("b", data)])
        before = {each.key: each.last_modified for each in objects.objects.all()}

        def renewed(name: str) -> bool:
            if use == "read":
                assert read(tier, name, len(data)) == data
            elif use == "read in part":
                view = memoryview(bytearray(100))
                assert tier.read([Part(f"{PLACE}/{name}", [view], SEGMENT_BYTES + 100)]) == [100]
            else:  # by another host, whose bytes differ: what is there stays
                assert tier.write([part(name, os.urandom(1000))]) == [True]
            found = {each.key: each.last_modified for each in objects.objects.all()}
            path = f"kv/{PLACE}/{name}"
            return bool(found[path] > before[path])

        time.sleep(1.1)  # the service's times are whole seconds
        assert not eventually(lambda: renewed("a"), limit_s=1), "it was used just before"
        later = time.time() + 1000
        monkeypatch.setattr(time, "time", lambda: later)
        assert eventually(lambda: renewed("a"))
        after = {each.key: each.last_modified for each in objects.objects.all()}
        assert after[f"kv/{PLACE}/b"] == before[f"kv/{PLACE}/b"]
        assert read(tier, "a", len(data)) == data


def test_credentials_and_buckets_that_are_wrong_are_said(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    with pytest.raises(TierError, match="blocks") as refused:
        open_s3(address(server.port, "&timeout=30s"))
    assert "a-secret-word" not in str(refused.value)
    file = tmp_path / "secret"
    file.write_text("a-secret-word")
    file.chmod(0o644)
    monkeypatch.setenv("KVKEEP_S3_SECRET_ACCESS_KEY_FILE", str(file))
    with pytest.raises(SettingsError, match=str(file)):
        open_s3(address(server.port))
    for text, why in (
        ("s3://blocks?endpoint=ftp://host", "expected https://host"),
        ("s3://blocks?size=much", "size: expected"),
        ("s3://blocks?endpoint=https://user:word@host", "credentials"),
        ("s3://blocks?ca=/nowhere", "/nowhere"),
    ):
        file.chmod(0o600)
        with pytest.raises(SettingsError, match=why):
            open_s3(text)


def test_plain_http_is_used_only_if_the_endpoint_says_so(start: Start) -> None:
    server = start()
    with pytest.raises(TierError):
        open_s3(f"s3://blocks?endpoint=https://127.0.0.1:{server.port}&region=r&timeout=2s")


def test_tls_needs_a_certificate_of_the_authority(start: Start, tmp_path: Path, kvkeep) -> None:  # type: ignore[no-untyped-def]
    for keys in ("ours", "foreign"):
        done = kvkeep("keygen", "--dir", str(tmp_path / keys), "--host", "127.0.0.1")
        assert done.returncode == 0, done.stderr
    ours = tmp_path / "ours"
    server = start(0, "-c", str(ours / "server.pem"), "-k", str(ours / "server.key"))
    bucket(server.port, ours / "ca.pem")
    where = f"s3://blocks/kv?endpoint=https://127.0.0.1:{server.port}&region=us-east-1&timeout=30s"
    with closing(CheckedTier(open_s3(f"{where}&ca={ours / 'ca.pem'}"))) as tier:
        assert tier.write([part("a", b"over tls")]) == [True] and read(tier, "a", 8) == b"over tls"
    with pytest.raises(TierError, match="certificate"):
        open_s3(f"{where}&ca={tmp_path / 'foreign' / 'ca.pem'}")
    with pytest.raises(TierError, match="certificate"):
        open_s3(where)
