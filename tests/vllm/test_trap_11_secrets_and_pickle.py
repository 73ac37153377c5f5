"""Trap 11, with vLLM: ports that anyone may use, and raw salts in names, labels, logs and
messages."""

from __future__ import annotations

import json
from pathlib import Path

from replicas import (
    POOL,
    Replica,
    Server,
    counting,
    eventually,
    metrics_text,
    prompt,
    request,
    status,
    tokens_of,
    transfer,
    usage,
)

from kvkeep.cli.keygen import make
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.relay import Relay

SALT = "correct-horse-battery-staple"


def test_an_engine_without_a_certificate_gets_nothing_and_serves(
    plain: Replica, one: Replica, tmp_path: Path
) -> None:
    # of this host, but not by the Unix socket, where an engine's user is proof enough
    host = "127.0.0.2"
    keys = make(tmp_path / "keys", ["engine"], hosts=(host,))
    secure = [
        word
        for name, value in keys["server"].items()
        for word in ("--" + name.replace("_", "-"), value)
    ]
    own = {f"kvkeep.{name}": keys["clients"][0][name] for name in ("tls_cert", "tls_key", "tls_ca")}
    tokens = prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    with Server(*POOL, "--address", "tcp://0.0.0.0:0", *secure) as server:
        address = f"tcp://{host}:{server.address.rpartition(':')[2]}"
        said = len(one.log())
        one.use("llama", transfer_config=transfer(address))
        answers = [one.fresh().serve([counting(tokens)])[0] for _ in range(2)]
        assert tokens_of(answers) == 2 * expected
        assert [answer.extra for answer in answers] == [0, 0]
        assert eventually(lambda: "TLS" in one.log()[said:])
        now = status(server)
        assert (
            now["auth_failures"] and not now["sessions"] and not now["counters"]["sessions_opened"]
        )
        engine = one.use("llama", address, extra=own)
        answers = [engine.fresh().serve([counting(tokens)])[0] for _ in range(2)]
        assert tokens_of(answers) == 2 * expected
        assert [answer.extra for answer in answers] == [0, 96], (
            "with a certificate it stores and finds"
        )
        engine.close_engine()


def test_no_place_has_a_salt(one: Replica, server: ServerProcess) -> None:
    with Relay(server.address) as wire:
        engine = one.use("llama", wire.address)
        one.wait_for(server)
        tokens = prompt(100)
        engine.serve([request(tokens, SALT)])
        [found] = engine.fresh().serve([counting(tokens, SALT)])
        assert found.extra == 96
        tenant = tenant_of(SALT)
        assert tenant.encode() in wire.sent and tenant in usage(server), "it was seen, by its id"
        said = (
            server.log()
            + engine.log()
            + metrics_text(server.http)
            + json.dumps([status(server), usage(server)])
        )
        assert SALT not in said and SALT.encode() not in wire.sent
        assert server.state_dir is not None
        directories = [Path(f"/dev/shm/kvkeep-{server.name}"), server.state_dir]
        files = [path for directory in directories for path in directory.rglob("*")]
        assert files and not [path for path in files if SALT in str(path)]
        engine.close_engine()
