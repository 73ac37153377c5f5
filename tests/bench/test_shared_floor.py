"""What a shared tier is compared with: a client library alone, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from kvkeep.testing.process import JsonProcess
from kvkeep.units import KIB, MIB


def test_it_says_how_fast_and_leaves_nothing(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'kv'}?size=64MiB"
    program = ("-m", "kvkeep.bench.shared_floor", address, "v1/bench/0/blocks")
    process = JsonProcess("the client library", program)
    for direction in ("write", "read"):
        process.send({"direction": direction, "nbytes": 64 * KIB, "total": 8 * MIB})
        assert process.receive(60)["gbps"] > 0
    process.send({"direction": "end"})
    process.receive(60)
    process.end()
    assert [path for path in (tmp_path / "kv" / "tmp").rglob("*") if path.is_file()] == []
