"""`kvkeep serve` as an operator meets it: starting, failing to start, ending."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caches import connect

from kvkeep.cli import serve as module
from kvkeep.cli.keygen import make
from kvkeep.cli.serve import JsonLines, PlainLines
from kvkeep.server.settings import TABLE
from kvkeep.testing.process import ServerProcess
from kvkeep.units import GIB
from kvkeep.wire import messages as m

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SHM = Path("/dev/shm")
OWN = ("hint: ", "--name, an --address and an --http-address of its own")
FREE_PORTS = ("--address", "tcp://127.0.0.1:0", "--http-address", "127.0.0.1:0")


def assert_explained(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, an error and a hint that hold the words, no traceback, no word of serving."""
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    for word in words:
        assert word in done.stderr


@pytest.fixture
def heeded() -> Iterator[Callable[[signal.Signals], None]]:
    """A process is born with the signals ignored that its parent ignores, as under nohup."""
    before: dict[signal.Signals, Any] = {}

    def heed(number: signal.Signals) -> None:
        before[number] = signal.signal(number, lambda *_: None)

    yield heed
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_server_under_nohup_outlives_its_terminal(
    heeded: Callable[[signal.Signals], None],
) -> None:
    heeded(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ServerProcess("--pool-size", "32MiB") as server:
        process = server.process
        assert process is not None
        server.send(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        assert "stopped" in server.stop() and process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_in_order_and_removes_the_pool(
    number: signal.Signals, heeded: Callable[[signal.Signals], None]
) -> None:
    heeded(number)
    with ServerProcess("--pool-size", "32MiB") as server:
        directory = SHM / f"kvkeep-{server.name}"
        assert directory.is_dir()
        process = server.process
        assert process is not None
        log = server.stop(number)
        assert process.returncode == 0
        assert not directory.exists()
        assert "stopped" in log


def test_a_second_signal_does_not_wait_for_sessions() -> None:
    with ServerProcess("--pool-size", "32MiB", "--shutdown-grace", "1h") as server:
        cache = connect(server)
        # A store that is never completed keeps the server waiting for its end.
        connection = cache.connection
        assert connection.layout is not None
        prepare = m.PrepareStore("default", connection.layout.layout, 0, b"", b"k" * 16)
        assert isinstance(connection.wait(connection.call(prepare, 10_000)), m.Prepared)
        process = server.process
        assert process is not None
        server.send(signal.SIGTERM)
        while readiness(server.http)[0] != 503:
            time.sleep(0.01)
        server.send(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert (SHM / f"kvkeep-{server.name}").exists(), "who is still writing there may go on"
        cache.close()


def readiness(http: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://{http}/readyz") as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("is_https", [False, True])
def test_it_says_for_people_where_it_serves(tmp_path: Path, is_https: bool) -> None:
    flags: list[str] = []
    if is_https:
        made = make(tmp_path / "keys", ["engine"])["server"] | {"http_address": "0.0.0.0:0"}
        flags = [
            word for name, value in made.items() for word in ("--" + name.replace("_", "-"), value)
        ]
    server = ServerProcess("--pool-size", "32MiB", *flags, state_dir=tmp_path)
    command = [word for word in server.command() if word != "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 0
    assert line.startswith("kvkeep is serving: engines on tcp://127.0.0.1:")
    where = "https://0.0.0.0:" if is_https else "http://127.0.0.1:"
    assert f"HTTP on {where}" in line and line.endswith("pool 32MiB\n")


def test_a_port_in_use_is_found_before_it_says_that_it_serves(kvkeep: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        common = ("--pool-size", "32MiB", "--name", f"port-{port}", "--state-dir", str(tmp_path))
        address = ("--address", f"tcp://127.0.0.1:{port}", "--http-address", "127.0.0.1:0")
        assert_explained(kvkeep("serve", *common, *address), f"127.0.0.1:{port}", *OWN)
        address = ("--address", "tcp://127.0.0.1:0", "--http-address", f"127.0.0.1:{port}")
        refused = kvkeep("serve", *common, *address)
        assert_explained(refused, f"cannot listen on 127.0.0.1:{port} for HTTP", *OWN)
        assert "serving on" not in refused.stderr, "no pool was made"
    assert not (SHM / f"kvkeep-port-{port}").exists()


def test_a_second_server_at_a_port_of_the_first_makes_no_pool(kvkeep: Run, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir=SHM) as place,
        ServerProcess("--pool-size", "32MiB", "--shm-dir", place) as server,
    ):
        before = Path(place).stat().st_mtime_ns  # changes with every file that comes or goes
        common = ("--pool-size", "32MiB", "--shm-dir", place, "--state-dir", str(tmp_path))
        for flag, port in (
            ("--address", server.address),
            ("--http-address", server.http),
        ):
            done = kvkeep("serve", "--name", "second", *common, *FREE_PORTS, flag, port)
            assert_explained(done, port.removeprefix("tcp://"), *OWN)
        assert Path(place).stat().st_mtime_ns == before
        assert readiness(server.http)[0] == 200


def test_a_second_server_of_one_name_is_refused_and_the_first_serves_on(
    kvkeep: Run, tmp_path: Path
) -> None:
    with ServerProcess("--pool-size", "32MiB") as server:
        words = ("--name", server.name, "--pool-size", "32MiB", "--state-dir", str(tmp_path))
        assert_explained(kvkeep("serve", *FREE_PORTS, *words), f"process {server.pid}", *OWN)
        assert readiness(server.http)[0] == 200


def test_a_pool_larger_than_shared_memory_is_refused(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep(
        "serve", *FREE_PORTS, "--pool-size", "60TiB", "--name", "huge", "--state-dir", str(tmp_path)
    )
    assert_explained(done, "60TiB does not fit", "--pool-size")
    assert not (SHM / "kvkeep-huge").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--pool-sise", "1GiB"), "--pool-size"),
        (("--pool-size", "much"), "expected a size"),
        (("--pool-size",), "--pool-size needs a value"),
        (
            ("--default-quota", "1GiB", "--pool-size", "32MiB"),
            "default_quota = 1GiB (flag --default-quota)",
        ),
        (
            ("--default-quota", "2MiB", "--default-limit", "1MiB"),
            "default_limit = 1MiB is less than default_quota",
        ),
        (("here",), 'unexpected argument "here"'),
        (("--config", "/nowhere.toml"), "/nowhere.toml cannot be read"),
    ],
)
def test_a_wrong_setting_stops_the_start(
    kvkeep: Run, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    done = kvkeep("serve", *FREE_PORTS, "--state-dir", str(tmp_path), "--name", "wrong", *words)
    assert_explained(done, expected)


def test_an_unknown_variable_names_the_nearest(kvkeep: Run) -> None:
    done = kvkeep("serve", env={"KVKEEP_POOL_SISE": "1GiB"})
    assert_explained(done, "KVKEEP_POOL_SISE", "hint: the nearest known one is KVKEEP_POOL_SIZE")


def test_a_kept_file_that_cannot_be_trusted_stops_the_start(kvkeep: Run, tmp_path: Path) -> None:
    kept = tmp_path / "small" / "quotas.json"
    kept.parent.mkdir()
    words = ("--state-dir", str(tmp_path), "--name", "small", "--pool-size", "32MiB")
    kept.write_text("{")
    assert_explained(kvkeep("serve", *FREE_PORTS, *words), str(kept), "repair it")
    assert not (SHM / "kvkeep-small").exists()


def test_settings_come_from_file_environment_and_flags(kvkeep: Run, tmp_path: Path) -> None:
    config = tmp_path / "kvkeep.toml"
    config.write_text('max_sessions = 7\npool_size = "32MiB"\n')
    with ServerProcess("--config", str(config), "--max-layouts", "9") as server:
        done = kvkeep("settings", "list", "--json", env={"KVKEEP_HTTP": server.http})
        values = {row["name"]: (row["value"], row["source"]) for row in json.loads(done.stdout)}
    assert values["max_sessions"] == ("7", f"file {config}")
    assert values["max_layouts"] == ("9", "flag --max-layouts")


def test_the_log_can_be_json() -> None:
    with ServerProcess("--pool-size", "32MiB", "--log-json") as server:
        lines = server.stop().splitlines()
    events = [json.loads(line) for line in lines]
    assert any(
        event["message"].startswith("serving on") and event["level"] == "info" for event in events
    )


def test_who_watches_a_large_pool_being_filled_sees_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_FIRST_PROGRESS_AFTER_S", 0.01)

    class Ready(threading.Event):
        """Ready at the third look."""

        looks = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.looks += 1
            if self.looks == 3:
                self.set()
            return self.is_set()

    pool = SimpleNamespace(filled_bytes=GIB, pool_bytes=8 * GIB)
    module._report_progress(SimpleNamespace(ready=Ready(), stopping=False, pool=pool))  # type: ignore[arg-type]
    said = capsys.readouterr()
    assert said.err.splitlines() == ["filling the pool: 1GiB of 8GiB"] * 2 + [
        "the pool is filled: 1GiB"
    ]
    assert not said.out


def test_help_lists_every_setting_with_its_default(kvkeep: Run) -> None:
    text = " ".join(kvkeep("serve", "--help").stdout.split())
    for name, line in TABLE.items():
        assert f"--{name.replace('_', '-')} {line.help} [default: {line.default}]" in text


def test_memory_of_one_message_serves_the_next() -> None:
    """Page faults of a process that makes and frees messages of 1 MiB, with malloc as it is and as
    the server sets it."""
    program = """
import resource, sys
from kvkeep.cli.serve import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
message = bytearray(1 << 20); del message
before = faults()
for _ in range(50):
    parts = [bytearray(1 << 20) for _ in range(3)]
    del parts
print(faults() - before)
"""
    found = [
        int(
            subprocess.run(
                [sys.executable, "-c", program, how], capture_output=True, text=True, check=True
            ).stdout
        )
        for how in ("as it is", "kept")
    ]
    if found[0] < 10_000:
        pytest.skip("this C library keeps freed memory by itself")
    assert found[1] < found[0] / 10


def record(message: str, *args: object, failed: bool = False) -> logging.LogRecord:
    info = None
    if failed:
        try:
            raise ValueError("inside")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("kvkeep.x", logging.WARNING, "x.py", 1, message, args, info)


def test_plain_lines_cannot_be_forged() -> None:
    line = PlainLines().format(
        record("session %s attached", "x\n2026 info kvkeep: all is well\x1b[2J\u2028")
    )
    assert line.count("\n") == 0 and "\x1b" not in line and "\u2028" not in line
    assert "warning kvkeep.x: session x\\x0a2026" in line


def test_json_lines_are_one_object_each() -> None:
    line = JsonLines().format(record("a\nb", failed=True))
    event = json.loads(line)
    assert line.count("\n") == 0
    assert event["message"] == "a\nb"
    assert event["level"] == "warning"
    assert "ValueError: inside" in event["traceback"]


def test_a_traceback_follows_on_lines_of_its_own() -> None:
    assert PlainLines().format(record("failed", failed=True)).endswith("ValueError: inside")
