"""Trap 6: a full memory hit waits for every slow part, eight stuck loads block all requests, and
health stays green."""

from __future__ import annotations

import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import clients
from engines import KEY, counting, eventually, oracle, prompt, serve, status, without_cache
from patience import patient_client, patient_engine
from test_processes import Client

from kvkeep.server.daemon import Daemon
from kvkeep.server.http_server import HttpServer
from kvkeep.server.settings import Settings
from kvkeep.testing.process import ServerProcess

STUCK = 8


def test_eight_stuck_loads_block_nobody(server: ServerProcess) -> None:
    """Processes stopped in the middle of a load, and connections that send half a message, all the
    while."""
    tokens = list(range(40))
    with patient_client(server) as cache:
        assert cache.put(tokens, clients.oracle(tokens)) == 10
    stuck = [Client("hold_lease", server.address, 40) for _ in range(STUCK)]
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    mute = [socket.create_connection((host, int(port))) for _ in range(STUCK)]
    try:
        for client in stuck:
            assert client.hears() == {"blocks": 10}
            client.process.send_signal(signal.SIGSTOP)
        for each in mute:
            each.sendall(b"\xff\0\0\0")
        assert status(server)["leases"] == STUCK
        model, mine = oracle(), prompt(22)
        with patient_engine(server, model) as one, patient_engine(server, model) as two:
            serve(one, [mine])
            [answer] = serve(two, [counting(mine)])
        assert answer.kv_transfer_params == {KEY: 20}
        assert [answer.token_ids] == without_cache(model, [mine])
        with patient_client(server) as cache:
            assert (
                clients.same(cache.get(tokens), clients.oracle(tokens))
                and cache.contains(tokens) == 10
            )
        assert status(server)["leases"] == STUCK, "they were stuck all the time"
    finally:
        for client in stuck:
            client.kill()
        for each in mute:
            each.close()
    assert eventually(lambda: status(server)["leases"] == 0), "and what they held came back"


def test_health_is_red_while_nothing_is_answered(tmp_path: Path) -> None:
    flags = [
        "--pool-size",
        "1MiB",
        "--slab-size",
        "64KiB",
        "--address",
        "tcp://127.0.0.1:0",
        "--shutdown-grace",
        "0s",
    ]
    flags += [
        "--http-address",
        "127.0.0.1:0",
        "--shm-dir",
        str(tmp_path),
        "--state-dir",
        str(tmp_path / "state"),
    ]
    daemon = Daemon(Settings.load(None, {}, flags))
    http = HttpServer(daemon, stuck_after_s=0.2)
    loop, go_on = threading.Thread(target=daemon.run), threading.Event()
    http.start()
    loop.start()
    try:
        assert daemon.ready.wait(60)
        assert eventually(lambda: health(http.address) == (200, True))
        daemon.run_in_loop(lambda: go_on.wait(60))
        assert eventually(lambda: health(http.address) == (503, False)), (
            "the loop is stuck, and health says so"
        )
        go_on.set()
        assert eventually(lambda: health(http.address) == (200, True))
    finally:
        go_on.set()
        daemon.stop()
        loop.join()
        http.stop()
        daemon.close()


def health(address: str) -> tuple[int, bool]:
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=30) as response:
            return response.status, json.load(response)["healthy"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["healthy"]
