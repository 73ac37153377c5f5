"""`kvkeep fuzz`: inputs that nobody would send, guided by what code they reach, against all that reads input."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.output import Json, counted, note, show_json, show_table
from kvkeep.errors import SettingsError


def fuzz(
    target: Annotated[str, typer.Option(help="wire, service, index, config, http, or all of them.")] = "all",
    seconds: Annotated[float, typer.Option(help="How long, shared evenly by the targets.")] = 60.0,
    inputs: Annotated[int, typer.Option(help="Stop a target after so many inputs. 0: when its time is over.")] = 0,
    seed: Annotated[int, typer.Option(help="Where the fuzzer's random numbers begin.")] = 0,
    corpus: Annotated[Path | None, typer.Option(help="Directory of TARGET.txt: lines of base64 to begin with.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Directory that keeps inputs which reached new code, for the next run.")
    ] = None,
    json: Json = False,
) -> None:
    """Fuzz what reads input, guided by coverage. Exit code 1 for a crash, a hang or a leak."""
    from kvkeep.testing.fuzz import TARGETS, total
    from kvkeep.testing.fuzz import fuzz as run

    if seconds <= 0 or inputs < 0 or seed < 0:
        raise SettingsError("--seconds, --inputs and --seed are no negative numbers", "leave them out for the default")
    names = list(TARGETS) if target == "all" else [target]
    results = []
    for name in names:
        result = run(name, seconds / len(names), inputs, seed, corpus, keep)
        results.append(result)
        for found in result.findings:
            note(f"{name}: {found['kind']}, input {found['input'] or '(none)'}\n{found['said']}")
        note(f"{name}: {counted(result.inputs, 'input')}, {counted(len(result.findings), 'finding')}")
    totals = total(results)
    if json:
        show_json(totals if target != "all" else totals | {"targets": [asdict(result) for result in results]})
    else:
        columns = ("target", "inputs", "messages", "crashes", "hangs", "leaks", "edges", "seconds")
        show_table(columns, [[asdict(result)[column] for column in columns] for result in results])
    if not all(result.is_clean for result in results):
        sys.exit(1)
