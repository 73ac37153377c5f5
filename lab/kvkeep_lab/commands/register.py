"""Adds the benchmarks of development to `kvkeep bench`: see `add_benches`."""

from __future__ import annotations

from kvkeep.cli.bench import OPTIONS, add_bench

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


def add_benches() -> None:
    """Called by `kvkeep bench` through the entry point in lab/pyproject.toml, which also names the
    commands of development."""
    OPTIONS.update(BENCH_OPTIONS)
    for name, help in BENCHES.items():
        add_bench(name, f"kvkeep_lab.bench.{name.replace('-', '_')}", help)
