"""`kvkeep plan`: how much memory and disk the requests of a trace are worth."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.bench.plan import Costs, Plan, plan
from kvkeep.bench.plan_chart import bars, draw
from kvkeep.bench.traces import read_trace
from kvkeep.cli.output import Json, note, show_facts, show_json, show_table
from kvkeep.errors import SettingsError
from kvkeep.units import format_duration, format_size, parse_size

_BAR = 24
_DEFAULT = Costs()


def show_plan(
    trace: Annotated[
        str,
        typer.Argument(
            help="Requests: in Mooncake's format, a log of vLLM that lists tokens, or a recording."
        ),
    ],
    memory: Annotated[
        str, typer.Option(help="Sizes of memory to try, with commas between; auto: by the trace.")
    ] = "auto",
    disk: Annotated[
        str, typer.Option(help="Sizes of a disk to try beside memory, with commas between.")
    ] = "auto",
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of a block; 0: what the trace says.", min=0, max=1 << 20)
    ] = 0,
    token_bytes: Annotated[
        str, typer.Option(help="Bytes of KV of a token; auto: what the trace says, or 128KiB.")
    ] = "auto",
    prefill_speed: Annotated[
        float, typer.Option(help="Tokens that an engine computes in a second.", min=1, max=1e9)
    ] = _DEFAULT.prefill_speed,
    memory_speed: Annotated[
        str, typer.Option(help="Bytes that an engine loads from memory in a second.")
    ] = format_size(_DEFAULT.memory_speed),
    disk_speed: Annotated[
        str, typer.Option(help="Bytes that come from the disk in a second.")
    ] = format_size(_DEFAULT.disk_speed),
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file.")] = None,
    json: Json = False,
) -> None:
    """Show what each size of memory and disk would save, from a trace of requests."""
    requests = read_trace(trace, block_tokens)
    costs = replace(
        _DEFAULT,
        block_tokens=requests.block_tokens or _DEFAULT.block_tokens,
        prefill_speed=prefill_speed,
        memory_speed=_size("--memory-speed", memory_speed),
        disk_speed=_size("--disk-speed", disk_speed),
    )
    if token_bytes != "auto":
        costs = replace(costs, token_bytes=_size("--token-bytes", token_bytes))
    elif requests.block_bytes:
        costs = replace(costs, token_bytes=max(1, requests.block_bytes // costs.block_tokens))
    sizes = (_blocks("--memory", memory, costs), _blocks("--disk", disk, costs))
    made = plan(trace, requests, costs, *sizes, report=_say_progress)
    if svg is not None:
        _write(svg, draw(made))
    if json:
        show_json(made.as_json())
    else:
        _show(made)


def _show(made: Plan) -> None:
    costs = made.costs
    took = format_duration(made.seconds)
    show_facts(
        [
            ("trace", f"{made.requests:,} requests in {took}, {made.blocks:,} blocks"),
            ("blocks", f"{made.distinct_blocks:,} different ones, {_of_block(costs)}"),
            ("assumed", f"an engine computes {costs.prefill_speed:,.0f} tokens/s"),
            ("", f"{format_size(costs.memory_speed)}/s from memory"),
            ("", f"{format_size(costs.disk_speed)}/s from a disk"),
            ("", "engines keep nothing themselves"),
        ]
    )
    print()
    rows = [
        (
            format_size(row.memory_bytes),
            format_size(row.disk_bytes) if row.disk_blocks else None,
            f"{row.hit_rate:.1%}",
            format_duration(row.saved_s),
            bar,
        )
        for row, bar in zip(made.rows, bars(made.rows, _BAR), strict=True)
    ]
    show_table(("memory", "disk", "found", "saved", ""), rows)
    print()
    print(made.words)


def _say_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        note(f"{done} of {total} sizes replayed")


def _of_block(costs: Costs) -> str:
    return f"of {costs.block_tokens} tokens, {format_size(costs.block_bytes)} each"


def _size(option: str, text: str) -> int:
    try:
        if nbytes := parse_size(text):
            return nbytes
        raise ValueError
    except ValueError:
        raise SettingsError(f'{option} "{text}": expected a size such as 128KiB') from None


def _blocks(option: str, text: str, costs: Costs) -> list[int]:
    """Sizes as numbers of blocks; none for auto."""
    if text == "auto":
        return []
    blocks = [_size(option, each) // costs.block_bytes for each in text.split(",")]
    if not all(blocks):
        raise SettingsError(
            f'{option} "{text}": less than a block of {format_size(costs.block_bytes)}',
            "use larger sizes, or set --token-bytes and --block-tokens",
        )
    return blocks


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise SettingsError(f"--svg {path} cannot be written: {error.strerror}") from None
    note(f"the picture is in {path}")
