"""`kvkeep record` and `kvkeep replay`, with a server and a client of their own."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from caches import connect

from kvkeep.client.cache import Cache
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SALT = "salt-of-a-lighthouse"


def client(server: ServerProcess) -> Cache:
    return connect(server, model="lighthouse", client="lighthouse")


def use(cache: Cache) -> None:
    assert cache.put([1, 2, 3], np.ones((3, 512), "uint64"), salt=SALT) == 3
    assert len(cache.get([1, 2, 3, 4], salt=SALT)) == 3


@contextmanager
def recording(
    server: ServerProcess, file: Path, *words: str, most_file_bytes: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """A recorder that has begun: its file has lines."""

    def set_up() -> None:  # a shell's background jobs, and what they start, ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if most_file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_file_bytes, most_file_bytes))

    command = [sys.executable, "-m", "kvkeep.cli.main", "record", str(file), "--http", server.http]
    with subprocess.Popen(
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=set_up,
    ) as process:
        try:
            assert eventually(lambda: file.exists() and file.stat().st_size > 0)
            yield process
        finally:
            process.kill()


@pytest.fixture
def fresh() -> Iterator[ServerProcess]:
    with ServerProcess("--pool-size", "64MiB") as server:
        yield server


def test_record_until_ctrl_c_and_replay(fresh: ServerProcess, kvkeep: Run, tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    with recording(fresh, file, "--json", "--seconds", "600") as recorder:
        with client(fresh) as cache:
            use(cache)
        recorder.send_signal(signal.SIGINT)
        out, err = recorder.communicate(timeout=60)
    assert recorder.returncode == 0 and f"the recording is in {file}" in err
    said = json.loads(out)
    assert said["reason"] == "stopped" and said["recorded"]["hit_blocks"] == 3
    assert file.stat().st_mode & 0o777 == 0o600
    assert "lighthouse" not in file.read_text()
    again = json.loads(kvkeep("replay", str(file), "--json").stdout)
    for name in ("lookups", "lookup_blocks", "hit_blocks", "stored_blocks", "evictions"):
        assert again["replayed"][name] == again["recorded"][name] == said["recorded"][name], name
    table = kvkeep("replay", str(file)).stdout
    assert "recorded" in table and "replayed" in table and "blocks found" in table
    planned = json.loads(kvkeep("plan", str(file), "--json").stdout)
    assert planned["requests"] == said["recorded"]["lookups"]


def test_it_ends_by_itself(server: ServerProcess, kvkeep: Run, tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    done = kvkeep("record", str(file), "--seconds", "0.5", "--http", server.http)
    assert done.returncode == 0 and "the time is over" in done.stdout
    assert "replayed" not in done.stdout


def test_a_second_recorder_is_refused(server: ServerProcess, kvkeep: Run, tmp_path: Path) -> None:
    with recording(server, tmp_path / "first.jsonl", "--seconds", "600") as first:
        second = tmp_path / "second.jsonl"
        refused = kvkeep("record", str(second), "--http", server.http)
        assert refused.returncode == 1 and "another `kvkeep record`" in refused.stderr
        assert not second.exists(), "no empty file is left"
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 0


def test_a_disk_that_is_full(fresh: ServerProcess, kvkeep: Run, tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    with (
        recording(fresh, file, "--seconds", "600", most_file_bytes=3_000) as recorder,
        client(fresh) as cache,
    ):
        use(cache)
        for _ in range(30):
            cache.get([1, 2, 3, 4], salt=SALT)
        _, err = recorder.communicate(timeout=60)
    assert recorder.returncode == 1
    assert f"error: {file} cannot be written: File too large" in err and "hint: make room" in err
    lines = file.read_text()
    assert lines.endswith("}\n") and f"is in {file}" in err, "what is there are whole lines"
    assert "cut off" in kvkeep("replay", str(file)).stdout
    next_one = kvkeep(
        "record", str(tmp_path / "next.jsonl"), "--seconds", "0.1", "--http", fresh.http
    )
    assert next_one.returncode == 0, "the server knows that the first has ended"


def test_a_server_that_ends_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    with (
        ServerProcess("--pool-size", "64MiB") as server,
        recording(server, file, "--seconds", "600") as recorder,
    ):
        server.stop()
        _, err = recorder.communicate(timeout=60)
    assert recorder.returncode == 3 and f"what was recorded until now is in {file}" in err


def test_a_file_that_cannot_be_made(server: ServerProcess, kvkeep: Run, tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("mine")
    for file, said in (
        (there, f"{there} exists"),
        (tmp_path, f"{tmp_path} exists"),
        (tmp_path / "no" / "file", "cannot be written: No such file or directory"),
        (Path("/proc/recording"), "cannot be written: No such file or directory"),
    ):
        refused = kvkeep("record", str(file), "--http", server.http)
        assert refused.returncode == 2 and said in refused.stderr and "hint:" in refused.stderr
    assert there.read_text() == "mine"


@pytest.mark.parametrize("size", ["much", "1KiB", "100GiB"])
def test_a_size_that_cannot_be(kvkeep: Run, tmp_path: Path, size: str) -> None:
    refused = kvkeep("record", str(tmp_path / "file"), "--max-size", size)
    assert refused.returncode == 2 and f'--max-size "{size}"' in refused.stderr


def test_without_a_server_no_file_is_left(kvkeep: Run, tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    assert kvkeep("record", str(file), "--http", "127.0.0.1:1").returncode == 3
    assert not file.exists()


def test_what_is_no_recording_is_refused(kvkeep: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 1, "hash_ids": [1]}\n')
    refused = kvkeep("replay", str(file))
    assert refused.returncode == 2 and "is no recording of requests" in refused.stderr
