"""Trap 9, with vLLM: sets that only grow, and memory of engines that are gone."""

from __future__ import annotations

from pathlib import Path

from replicas import Replica, at_rest, counting, eventually, prompt, request, status

from kvkeep.connector.reports import REMEMBERED
from kvkeep.testing.process import ServerProcess

ROUND = 40
# Prompts that were seen under another salt, of which the connector keeps a limited number.
SEEN = "scheduler.half.planner._reports._seen"


def test_aborts_at_every_moment_leave_no_lease_and_no_memory_of_the_request(
    one: Replica, server: ServerProcess
) -> None:
    engine, tokens = one.use("llama", server), prompt(300)
    engine.serve([request(tokens)])

    def aborts() -> None:
        for number in range(ROUND):
            names = engine.fresh().submit(
                [counting(tokens), counting(prompt(50), f"salt {number}")]
            )
            engine.step(number % 5)
            engine.abort(names)
        engine.fresh()
        assert at_rest(server), "no lease waits for a timer"

    def grown() -> dict[str, int]:
        now = engine.call("remembered")
        assert now.pop(SEEN) <= REMEMBERED
        return {name: size for name, size in now.items() if size > before.get(name, 0)}

    before: dict[str, int] = engine.call("remembered")
    sizes = {name.rpartition(".")[2]: size for name, size in before.items()}
    assert sizes["_requests"] == 0 and "_loading" in sizes, "what is looked for would be seen"
    aborts()
    assert eventually(lambda: grown() == {}), f"what the connector keeps has grown: {grown()}"
    [answer] = engine.serve([counting(tokens)])
    assert answer.extra == 288


def test_the_server_maps_nothing_of_an_engine_and_keeps_nothing_of_a_dead_one(
    one: Replica, two: Replica, server: ServerProcess
) -> None:
    one.use("llama", server).serve([request(prompt(100))])
    two.use("llama", server).submit([request(prompt(400), max_tokens=50)])
    two.step(3)
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    assert "segment-00000" in maps, "what is looked for would be seen"
    assert not [name for name in ("libcuda", "libcudart", "torch", "nvidia") if name in maps]
    pid = two.pid
    assert [each for each in status(server)["sessions"] if each["pid"] == pid]
    two.kill()
    assert eventually(
        lambda: not [each for each in status(server)["sessions"] if each["pid"] == pid]
    )
    assert at_rest(server)
