"""Adds the commands of development to `kvkeep`: see `add_commands`."""

from __future__ import annotations

import typer

from kvkeep.cli.bench import OPTIONS, add_bench
from kvkeep_lab.commands.chaos import chaos
from kvkeep_lab.commands.engine_fuzz import engine_fuzz
from kvkeep_lab.commands.fuzz import fuzz

BENCHES = {
    "index": "Memory of a resident block, and the speed of storing and evicting.",
    "turns": "The longest time that each request occupies the server's loop.",
    "security": "The cost of TLS, and what timing reveals about other tenants.",
    "engine": "The cost of a cache on misses, and its gain on hits.",
    "observe": "The cost of attribution, metrics, reports and events for routers.",
    "vllm-load": "Throughput and decoding speed of real vLLM under load, with the same connectors.",
    "vllm-paused": "Throughput of real vLLM while the server hangs, against no connector.",
}
BENCH_OPTIONS = {
    "layers": "Layers that a block is spread over.",
    "lookups": "How often each lookup is made.",
    "prompts": "How many prompts are served together.",
    "requests": "How many requests.",
    "scenarios": "What is measured, with commas between.",
    "seconds": "For how long.",
    "threads": "Threads that the model computes with.",
}


def add_commands(app: typer.Typer) -> None:
    """Called by `kvkeep` through the entry point in lab/pyproject.toml."""
    app.command("chaos")(chaos)
    app.command("engine-fuzz")(engine_fuzz)
    app.command("fuzz")(fuzz)
    OPTIONS.update(BENCH_OPTIONS)
    for name, help in BENCHES.items():
        add_bench(name, f"kvkeep_lab.bench.{name.replace('-', '_')}", help)
