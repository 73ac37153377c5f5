"""Another user of the host offers an engine a pool of its own: the engine maps nothing of it, says
why, and serves on.

The users are real ones: `setpriv` starts a process as each of them, which only root can do.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from engines import engine, eventually, oracle, prompt, serve, tokens_of, without_cache
from local_users import (
    AS_ROOT_INSIDE,
    ATTACKER,
    VICTIM,
    ServerAs,
    kvkeep_as,
    needs_namespaces,
    rights_of,
)

from kvkeep.testing.process import ServerProcess
from kvkeep.wire.peers import OVERFLOW_UID

POOL = ("--pool-size", "8MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def run(become: Any, program: str, *arguments: str) -> dict[str, Any]:
    """What a program prints as JSON; it must come to its end."""
    command = [*become, sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout or "{}")
    return said


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/segment-")


# -- the pool alone: each file as the attacker would have it

MAKES_A_POOL = """
import os, pathlib, sys
directory, directory_mode, file_mode = pathlib.Path(sys.argv[1]), int(sys.argv[2], 8), int(sys.argv[3], 8)
os.umask(0)
directory.mkdir()
for name, content in (("epoch", b"0000000000000007"), ("daemon.lock", b""), ("session-7-1.lock", b""),
                      ("segment-00000", bytes(1 << 20)), ("presence-0000000000000007", bytes(1 << 14))):
    (directory / name).write_bytes(content)
    (directory / name).chmod(file_mode)
directory.chmod(directory_mode)
"""
TAKES_IT = """
import json, pathlib, sys
from kvkeep.client.shared_pool import SharedPool
from kvkeep.errors import UntrustedPool
from kvkeep.wire.messages import PoolPlace, Welcome, WireLimits
directory, trusted = sys.argv[1], tuple(map(int, sys.argv[2:]))
place = PoolPlace(directory, directory + "/session-7-1.lock", 1 << 20, 1 << 20)
why = ""
try:
    fence = SharedPool.attach(Welcome(1, 7, "kvkeep", place, WireLimits(1, 1, 1, 1), [], False), trusted_users=trusted)
    if fence is not None:
        fence.segments.view(0, 64)
except UntrustedPool as error:
    why = str(error)
print(json.dumps({"why": why, "mapped": pathlib.Path("/proc/self/maps").read_text().count("/segment-")}))
"""


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """The path of a pool in a directory that all may write to, as /dev/shm is."""
    for each in (tmp_path, *tmp_path.parents[:2]):  # pytest makes them for their owner
        each.chmod(0o711)
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o1777)
    return tmp_path / "shm" / "kvkeep-default"


@needs_root
@pytest.mark.parametrize("victim", [VICTIM, 0], ids=["a user", "root"])
@pytest.mark.parametrize(
    ("directory", "files"), [("777", "666"), ("755", "644"), ("700", "666"), ("1777", "666")]
)
def test_a_pool_of_another_user_is_not_mapped_whatever_its_mode(
    pool: Path, victim: int, directory: str, files: str
) -> None:
    run(kvkeep_as(ATTACKER), MAKES_A_POOL, str(pool), directory, files)
    said = run(kvkeep_as(victim), TAKES_IT, str(pool))
    assert said["mapped"] == 0
    could_look = victim == 0 or directory != "700" or "dac_read_search" in str(rights_of(victim))
    assert (f"belongs to another user (uid {ATTACKER})" in said["why"]) is could_look


@needs_root
@pytest.mark.parametrize(
    ("directory", "files", "mapped"),
    [("777", "600", 0), ("700", "666", 0), ("700", "660", 0), ("700", "600", 1)],
)
def test_root_maps_the_pool_of_a_user_whom_it_trusts_if_nobody_else_may_write_it(
    pool: Path, directory: str, files: str, mapped: int
) -> None:
    run(kvkeep_as(ATTACKER), MAKES_A_POOL, str(pool), directory, files)
    said = run(kvkeep_as(0), TAKES_IT, str(pool), str(ATTACKER))
    assert said["mapped"] == mapped and bool(said["why"]) is not bool(mapped)
    assert mapped or "can be written by other users" in said["why"]
    assert run(kvkeep_as(0), TAKES_IT, str(pool), str(VICTIM))["mapped"] == 0


@needs_root
@needs_namespaces
def test_in_a_user_namespace_a_user_who_is_not_mapped_is_refused_with_the_remedy(
    pool: Path,
) -> None:
    """The kernel shows every such user as the overflow uid, also one who is trusted by uid."""
    run(kvkeep_as(ATTACKER), MAKES_A_POOL, str(pool), "755", "644")
    for trusted in ([], [str(ATTACKER)]):
        said = run(AS_ROOT_INSIDE, TAKES_IT, str(pool), *trusted)
        assert said["mapped"] == 0
        assert f"belongs to another user (uid {OVERFLOW_UID})" in said["why"]
        assert "run both sides in one user namespace" in said["why"]


# -- a server of the attacker's

ASKS = """
import json, logging, pathlib, sys
import numpy as np
import kvkeep
from kvkeep.client.options import ClientOptions
lines = []
class Log(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("kvkeep").addHandler(Log())
block = {"model": "m", "revision": "1", "block_tokens": 1, "block_shape": (512,), "dtype": "uint64"}
options = ClientOptions(sys.argv[1], reconnect_interval_ms=50)
with kvkeep.connect(options=options, wait_ms=3_000, **block) as cache:
    stored = cache.put([1, 2, 3], np.ones((3, 512), "uint64"))
    said = {"up": cache.connection.up, "stored": stored, "found": len(cache.get([1, 2, 3])), "lines": lines,
            "mapped": pathlib.Path("/proc/self/maps").read_text().count("/segment-")}
print(json.dumps(said))
"""


@needs_root
@pytest.mark.parametrize("victim", [VICTIM, 0], ids=["a user", "root"])
def test_a_server_of_another_user_with_a_pool_for_all_is_not_used(victim: int) -> None:
    # not below pytest's directory, which each run of pytest closes to other users
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as name:
        os.chown(name, ATTACKER, ATTACKER)
        state = {"state_dir": Path(name)}
        with ServerAs(kvkeep_as(ATTACKER), *POOL, "--no-verify", **state) as server:
            for path in (server.pool, *server.pool.iterdir()):
                path.chmod(0o777)
            said = run(kvkeep_as(victim), ASKS, server.address)
    assert (said["up"], said["stored"], said["found"], said["mapped"]) == (False, 0, 0, 0)
    [line] = said["lines"]
    assert f"another user (uid {ATTACKER})" in line and "Serving without the cache" in line


# -- an engine


def give_to_attacker(pool: Path) -> None:
    for path in (pool, *pool.iterdir()):
        os.chown(path, ATTACKER, -1)


def give_back(pool: Path) -> None:
    for path in (pool, *pool.iterdir()):
        os.chown(path, os.geteuid(), -1)
        path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("how", ["of another user", "its directory", "its segments"])
def test_an_engine_serves_without_a_pool_that_is_not_trusted_and_with_it_when_it_is(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    caplog.set_level(logging.WARNING, "kvkeep")
    model, prompts = oracle(), [prompt(24), prompt(32)]
    expected, before = without_cache(model, prompts), mapped()
    with ServerProcess(*POOL) as server:
        if how == "of another user":
            give_to_attacker(server.pool)
        for path in {
            "its directory": [server.pool],
            "its segments": server.pool.glob("segment-*"),
        }.get(how, ()):
            path.chmod(0o777)
        with engine(
            server, model, extra={"kvkeep.reconnect_interval_ms": 50}, enable_prefix_caching=False
        ) as llm:
            assert tokens_of(serve(llm, prompts)) == expected
            assert mapped() == before, "nothing of it is mapped"
            assert any(
                "is not trusted" in line and str(server.pool) in line for line in caplog.messages
            )
            give_back(server.pool)
            assert eventually(lambda: mapped() > before), "as soon as it is not so"

            def hits() -> bool:
                answers = serve(llm, prompts)
                assert tokens_of(answers) == expected
                return any(each.metrics.external_cached_tokens for each in answers)

            assert eventually(hits)
