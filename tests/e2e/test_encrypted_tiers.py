"""Hosts with one shared directory that is encrypted: those with the keys start from what the others
have computed, those without find nothing and disturb nobody. The files tell nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import POOL, at_rest, counting, engine, eventually, oracle, prompt, serve
from tiered import BLOCKS, FOUND, TOKENS, hit, is_ready, is_written, tiers, written

from kvkeep.cli.remote import ask
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import tenant_of
from kvkeep.server.shared import tenant_digest
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.tier_keys import new_tier_keys

SALT = "summer-2024"  # one that can be guessed
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server with memory of its own, the shared directory, and a file of keys."""
    with ExitStack() as stack:

        def run(keys: Path | None) -> ServerProcess:
            given = () if keys is None else ("--tier-keys", str(keys))
            tier = ("--tier", f"file://{tmp_path / 'shared'}?size=64MiB")
            started = stack.enter_context(ServerProcess(*POOL, *tier, *given))
            # Until it has read the log of clears, which it may be unable to.
            eventually(lambda: is_ready(started), limit_s=5.0)
            return started

        yield run


def key_file(path: Path, text: str = "") -> Path:
    """Put in place as a whole: servers look at it while they run."""
    new = path.with_suffix(".new")
    new.write_text(text or new_tier_keys())
    new.chmod(0o600)
    return new.rename(path)


def store(server: ServerProcess, model: Any, tokens: list[int]) -> None:
    """Computes this prompt, which ends up in the tier."""
    before = written(server)
    with engine(server, model) as one:
        serve(one, [counting(tokens, SALT)])
    assert is_written(server, before + BLOCKS)


def found(server: ServerProcess, model: Any, tokens: list[int]) -> int:
    return hit(server, model, tokens, SALT)


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_hosts_with_the_keys_share_and_those_without_find_and_disturb_nothing(
    start: Start, tmp_path: Path
) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    keys = key_file(tmp_path / "tier.keys")
    one, two = start(keys), start(keys)
    store(one, model, tokens)
    one.stop(signal.SIGKILL)
    stored = files(tmp_path / "shared" / "v1")
    for other in (None, key_file(tmp_path / "other.keys")):
        stranger = start(other)
        assert found(stranger, model, tokens) == 0
        assert is_ready(stranger)
        assert at_rest(stranger)
    assert stored.items() <= files(tmp_path / "shared" / "v1").items(), "they were removed"
    assert found(two, model, tokens) == FOUND
    assert tiers(two)[-1]["counts"]["promoted_blocks"] == BLOCKS and at_rest(two)


def test_files_names_and_processes_tell_nothing(start: Start, tmp_path: Path) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    keys = key_file(tmp_path / "tier.keys")
    one = start(keys)
    store(one, model, tokens)
    (mover,) = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
    shown = [Path(f"/proc/{mover}/{name}").read_bytes() for name in ("cmdline", "environ")]
    told = [ask(one.http, path) for path in ("/v1/status", "/v1/settings", "/v1/tiers")]
    shown += [one.log().encode(), repr(told).encode()]
    for secret in keys.read_text().split():
        if len(secret) == 64:
            assert not any(secret.encode() in each for each in shown)
            assert not any(bytes.fromhex(secret) in each for each in shown)
    assert b"is encrypted: key" in shown[2]
    stored = files(tmp_path / "shared")
    everything = b"".join(bytes(path) + content for path, content in stored.items())
    tenant = tenant_of(SALT)
    for plain in (SALT, tenant, tenant_digest(tenant), tenant_digest(SALT)):
        assert plain.encode() not in everything
    # The same blocks without encryption, to search for their bytes.
    with ServerProcess(*POOL, "--tier", f"file://{tmp_path / 'plain'}?size=64MiB") as other:
        store(other, model, tokens)
    plain_files = files(tmp_path / "plain" / "v1")
    assert tenant_digest(tenant) in "".join(map(str, plain_files))
    blocks = [each for path, each in plain_files.items() if "control" not in path.parts]
    assert len(everything) >= sum(map(len, blocks)) > 0
    for content in blocks:
        samples = {content[at : at + 16] for at in range(len(content) // 2, len(content) - 16, 16)}
        telling = {each for each in samples if len(set(each)) > 6}
        assert telling and not any(each in everything for each in telling)


def test_a_clear_reaches_hosts_with_the_keys_only(start: Start, tmp_path: Path) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    keys = key_file(tmp_path / "tier.keys")
    one, two, stranger = start(keys), start(keys), start(None)
    store(one, model, tokens)
    assert found(two, model, tokens) == FOUND

    def clear(server: ServerProcess) -> list[str]:
        token = server.state_dir / server.name / "admin.token"
        path = f"/v1/tenants/{tenant_of(SALT)}/blocks"
        return list(ask(server.http, path, "DELETE", token_file=token)["unreached"])

    assert clear(stranger) == []
    assert found(two, model, tokens) == FOUND, "it has no key"
    assert clear(one) == []
    assert found(two, model, tokens) == 0


def test_keys_change_while_servers_run(start: Start, tmp_path: Path) -> None:
    """The three steps of the guide, with one host a step ahead of the other."""
    model = oracle()
    text, more = new_tier_keys(), new_tier_keys().splitlines()[-1] + "\n"
    old = text.splitlines(keepends=True)[-1]
    new = text.replace(old, more)
    paths = [tmp_path / "one.keys", tmp_path / "two.keys"]
    steps = [text, text + more, new + old, new]
    one, two = (start(key_file(path, text)) for path in paths)
    prompts = iter([prompt(TOKENS) for _ in range(3)])
    for path, server, other, step in (
        (paths[0], one, two, 1),
        (paths[1], two, one, 1),
        (paths[0], one, two, 2),
        (paths[1], two, one, 2),
        (paths[0], one, two, 3),
    ):
        before = server.log().count("have changed")
        key_file(path, steps[step])
        assert eventually(lambda s=server, b=before: s.log().count("have changed") > b)
        if path == paths[0]:
            tokens = next(prompts)
            store(server, model, tokens)
            assert found(other, model, tokens) == FOUND, f"step {step}"
    assert is_ready(one)


def test_a_server_whose_keys_cannot_be_used_does_not_start(start: Start, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "tier.keys")
    keys.chmod(0o644)
    with pytest.raises(Unavailable, match=r"tier_keys: .*open to other users") as caught:
        start(keys)
    assert f"chmod 600 {keys}" in str(caught.value)


def test_another_log_is_used_after_a_restart_only(start: Start, tmp_path: Path) -> None:
    """What the server knows of clears is of the log that it has read at the start."""
    model, tokens = oracle(), prompt(TOKENS)
    keys = key_file(tmp_path / "tier.keys")
    one = start(keys)
    store(one, model, tokens)
    key_file(keys, new_tier_keys())
    assert eventually(lambda: "has another entry log" in one.log())
    tier = lambda: tiers(one)[-1]  # noqa: E731
    assert is_ready(one), "it goes on with the keys of before"
    (mover,) = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
    os.kill(int(mover), signal.SIGKILL)
    assert eventually(
        lambda: tier()["state"] == "set aside" and "another entry log" in tier()["problem"]
    )
    assert found(one, model, tokens) == FOUND, "memory goes on"
    one.stop(signal.SIGTERM)
    one.start()
    assert eventually(lambda: is_ready(one))
