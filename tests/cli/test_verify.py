"""`kvkeep verify`: of a running server, and of a disk that no server uses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.server.test_movement import BLOCKS, World, blocks_of, children_of

from kvkeep.cli import remote
from kvkeep.cli import verify as verify_command
from kvkeep.cli.remote import ask
from kvkeep.cli.verify import facts
from kvkeep.errors import TierError
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.clock import eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
BLUE = "blue"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """With a conversation of `default` and one of another tenant, both on disk."""
    made = World(tmp_path / "disk")
    made.put(1)
    made.put(2, salt=BLUE)
    assert eventually(lambda: made.written(2 * BLOCKS))
    yield made
    made.close()


def damage(world: World, conversation: int, *blocks: int) -> None:
    """Changes blocks on the disk."""
    content = (world.disk / "data").read_bytes()
    with open(world.disk / "data", "r+b") as data:
        for block in blocks:
            data.seek(content.index(blocks_of(conversation, BLOCKS)[block].tobytes()) + 99)
            data.write(b"wrong")
        os.fsync(data.fileno())


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (disk,) = json.loads(done.stdout)
    return dict(disk)


def test_a_running_server_is_verified_and_drops_bad_blocks(world: World, kvkeep: Run) -> None:
    good = kvkeep("verify", "--http", world.server.http, "--json")
    assert good.returncode == 0 and good.stderr == ""
    shown = said(good)
    assert (shown["state"], shown["blocks"], shown["bad_blocks"]) == ("done", 2 * BLOCKS, 0)
    assert shown["nbytes"] == 2 * BLOCKS << 16 and shown["seconds"] > 0
    damage(world, 1, 20, 30)
    damage(world, 2, 40)
    bad = kvkeep("verify", "--http", world.server.http, "--json")
    assert bad.returncode == 4
    tenants = {"default": 2, tenant_of(BLUE): 1}
    assert (said(bad)["bad_blocks"], said(bad)["bad_by_tenant"]) == (3, tenants)
    assert world.tier()["counts"]["bad_blocks"] == 3
    assert world.tier()["counts"]["verified_blocks"] == 4 * BLOCKS
    assert world.tier()["blocks"] == 20 + 40
    again = kvkeep("verify", "--http", world.server.http)
    assert again.returncode == 0 and "60 of 60 blocks, 3.75MiB in" in again.stdout
    world.restart()
    assert eventually(lambda: world.get(1) == 20)
    assert eventually(lambda: world.get(2, salt=BLUE) == 40)


def test_a_disk_that_no_server_uses_is_verified(world: World, kvkeep: Run) -> None:
    address = f"disk://{world.disk}?size=64MiB"
    refused = kvkeep("verify", str(world.disk))
    assert refused.returncode == 1 and "in use by another kvkeep server" in refused.stderr
    assert "leave TIER out" in refused.stderr
    world.server.stop()
    shutil.rmtree(world.server.pool, ignore_errors=True)
    before = {path.name: path.stat().st_size for path in world.disk.iterdir()}
    good = kvkeep("verify", str(world.disk), "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert (said(good)["state"], said(good)["blocks"]) == ("done", 2 * BLOCKS)
    damage(world, 1, 7)
    bad = kvkeep("verify", address)
    assert bad.returncode == 4
    assert "bad blocks  1\n" in bad.stdout and "1 of tenant default" in bad.stdout
    assert {path.name: path.stat().st_size for path in world.disk.iterdir()} == before
    assert kvkeep("verify", address).returncode == 0  # the bad one and what hung on it are dropped
    world.server.start()
    assert world.tier()["blocks"] == BLOCKS + 7
    assert eventually(lambda: world.get(1) == 7)
    assert eventually(lambda: world.get(2, salt=BLUE) == BLOCKS)


def test_ctrl_c_ends_it_and_shows_what_was_found(world: World) -> None:
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    try:
        command = [sys.executable, "-m", "kvkeep.cli.main", "verify", "--http", world.server.http]
        with subprocess.Popen(
            [*command, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background jobs, and what they start, ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert eventually(lambda: world.ask("/v1/verify"))
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and "cancelled" in errors
        (shown,) = json.loads(out)
        assert (shown["state"], shown["total_blocks"]) == ("cancelled", 2 * BLOCKS)
    finally:
        os.kill(mover, signal.SIGCONT)
    assert eventually(lambda: world.tier()["counts"]["verified_blocks"] > 0)
    assert world.get(1) == BLOCKS and world.tier()["state"] == "ok"


def test_ctrl_c_during_any_request_leaves_no_server_verifying(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between a request and its reply the command cannot know what the server does."""
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    press = begun_then(world, lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(remote, "ask", press)
    try:
        verify_command.verify(http=world.server.http, json=True)
    finally:
        os.kill(mover, signal.SIGCONT)
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["state"] == world.ask("/v1/verify")[0]["state"] == "cancelled"


def begun_then(world: World, act: Callable[[], None]) -> Callable[..., Any]:
    """Asks the server, and acts when it has begun to verify, before the command knows."""

    def ask_and_act(_: str, *args: Any, **options: Any) -> Any:
        answer = ask(world.server.http, *args, **options)  # another port after a restart
        if args[1] == "POST":
            act()
        return answer

    return ask_and_act


def test_ctrl_c_ends_the_check_of_a_disk_that_no_server_uses(
    world: World, kvkeep: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is bad by then is dropped."""
    world.server.stop()
    damage(world, 1, 7)
    check_piece = verify_command.check_piece

    def press_and_check(*args: Any) -> Any:
        if check_piece in pressed:
            return check_piece(*args)
        pressed.append(check_piece)
        signal.raise_signal(signal.SIGINT)
        return check_piece(*args)

    pressed: list[Any] = []
    monkeypatch.setattr(verify_command, "check_piece", press_and_check)
    with pytest.raises(typer.Exit) as ended:
        verify_command.verify(str(world.disk), json=True)
    assert ended.value.exit_code == 4
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["bad_blocks"]) == ("cancelled", 1)
    assert said(kvkeep("verify", str(world.disk), "--json"))["total_blocks"] == BLOCKS + 7


def test_a_disk_that_is_set_aside_is_not_verified(world: World, kvkeep: Run) -> None:
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGKILL)
    assert eventually(lambda: world.tier()["state"] == "set aside")
    done = kvkeep("verify", "--http", world.server.http, "--json")
    assert done.returncode == 1 and f"{world.disk} was not verified: the mover ended" in done.stderr
    assert (said(done)["state"], said(done)["blocks"]) == ("failed", 0)


def test_a_disk_that_could_not_be_opened_is_not_verified(tmp_path: Path, kvkeep: Run) -> None:
    made = World(tmp_path / "gone" / "disk", tmp_path / "disk")
    try:
        done = kvkeep("verify", "--http", made.server.http, "--json")
        assert done.returncode == 1 and "was not verified: cannot use" in done.stderr
        assert [each["state"] for each in json.loads(done.stdout)] == ["done", "failed"]
    finally:
        made.close()


def test_a_server_that_is_restarted_meanwhile_has_verified_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    monkeypatch.setattr(remote, "ask", begun_then(world, lambda: world.restart(signal.SIGKILL)))
    with pytest.raises(TierError, match="was restarted"):
        verify_command.verify(http=world.server.http)


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["/nowhere/at/all"], 1, "no disk tier"),
        (["disk:///tmp"], 2, "size"),
        (["disk:///a?size=1GiB,disk:///b?size=1GiB"], 2, "one address"),
        (["--http", "127.0.0.1:1"], 3, "no kvkeep server answers"),
    ],
)
def test_refusals(kvkeep: Run, words: list[str], code: int, error: str) -> None:
    done = kvkeep("verify", *words)
    assert done.returncode == code and error in done.stderr and not done.stdout


def test_facts_of_a_disk() -> None:
    shown = {
        "tier": "/disk",
        "state": "failed",
        "problem": "a job took more than 10 s",
        "blocks": 1500,
        "total_blocks": 3000,
        "nbytes": 1 << 30,
        "bad_blocks": 3,
        "unreadable_blocks": 1,
        "bad_by_tenant": {"t-1": 1, "default": 2},
        "seconds": 2.0,
    }
    assert facts(shown) == [
        ("tier", "/disk"),
        ("state", "failed: a job took more than 10 s"),
        ("checked", "1,500 of 3,000 blocks, 1GiB in 2.0 s, 512MiB/s"),
        ("bad blocks", "3"),
        ("", "2 of tenant default"),
        ("", "1 of tenant t-1"),
        ("unreadable", "1"),
    ]
