"""Trap 9: leaks: read locks for minutes after an abort, sets that only grow, GPU memory of engines
that are gone."""

from __future__ import annotations

import signal
from pathlib import Path

from engines import KEY, at_rest, counting, eventually, forget_local, oracle, prompt, serve, status
from patience import patient_engine
from test_processes import Client

from kvkeep.testing.process import ServerProcess

ABORTS = 200


def test_aborts_at_every_moment_leave_no_lease_and_no_memory_of_the_request(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(22)
    with patient_engine(server, model) as llm:
        serve(llm, [tokens])
        for number in range(ABORTS):
            forget_local(llm)
            request = llm.engine.add(tokens)
            for _ in range(number % 4):
                llm.engine.step()
            llm.engine.abort(request.id)
        llm.engine.step()
        assert llm.engine.flush()
        assert at_rest(server), "no lease waits for a timer"
        planner = llm.engine.scheduler.planner
        assert planner is not None and planner.idle
        llm.engine.check_integrity()
        [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: 20}


def test_what_a_killed_engine_held_comes_back(server: ServerProcess) -> None:
    for name, what in (("hold_lease", "blocks"), ("store_half", "slots")):
        Client("put", server.address, 40).close()
        client = Client(name, server.address, 40)
        assert what in client.hears()
        assert status(server)["leases"] + status(server)["writes"] == 1
        client.process.send_signal(signal.SIGKILL)
        client.close()
        assert at_rest(server)
    assert eventually(lambda: status(server)["sessions"] == [])
    assert not list(Path(f"/dev/shm/kvkeep-{server.name}").glob("session-*")), (
        "nor a file of theirs"
    )


def test_the_server_can_hold_no_gpu_memory(server: ServerProcess) -> None:
    """It never maps an engine's memory, has no CUDA library loaded, and no torch."""
    model = oracle()
    with patient_engine(server, model) as llm:
        serve(llm, [prompt(22)])
        maps = Path(f"/proc/{server.pid}/maps").read_text()
    assert "segment-00000" in maps, "what is looked for would be seen"
    assert not [name for name in ("libcuda", "libcudart", "torch", "nvidia") if name in maps]
