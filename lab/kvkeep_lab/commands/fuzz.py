"""`kvkeep fuzz`: inputs that nobody would send, guided by coverage or fast, against all that reads
input."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvkeep.cli.output import Json, counted, note, show_json, show_table
from kvkeep.errors import SettingsError

if TYPE_CHECKING:
    from kvkeep_lab.fuzz.targets import FuzzResult

_SECONDS = 60.0


def fuzz(
    target: Annotated[
        str, typer.Option(help="wire, service, index, config, http, or all of them.")
    ] = "all",
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Duration in seconds, divided evenly among the targets; 60 if not given."
        ),
    ] = None,
    inputs: Annotated[
        int,
        typer.Option(help="Stop a target after this number of inputs. 0: when its time is over."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the fuzzer's random numbers.")] = 0,
    corpus: Annotated[
        Path | None, typer.Option(help="Directory of TARGET.txt: lines of base64 to begin with.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Directory for inputs that reached new code, for the next run."),
    ] = None,
    malformed_frames: Annotated[
        int | None,
        typer.Option(
            help="Without coverage: random inputs of --seed until wire and service have each "
            "refused this number of frames."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fuzz what reads input, guided by coverage. Exit code 1 for a crash, a hang or a leak."""
    from kvkeep_lab.fuzz.flood import FLOODS, flood
    from kvkeep_lab.fuzz.targets import TARGETS, total
    from kvkeep_lab.fuzz.targets import fuzz as run

    _check(seconds, inputs, seed, corpus, keep, malformed_frames)
    every = TARGETS if malformed_frames is None else FLOODS
    names = list(every) if target == "all" else [target]
    results = []
    for name in names:
        if malformed_frames is not None:
            result = flood(name, malformed_frames, seed)
        else:
            result = run(name, (seconds or _SECONDS) / len(names), inputs, seed, corpus, keep)
        results.append(result)
        _tell(result)
    totals = total(results)
    if json:
        show_json(
            totals
            if target != "all"
            else totals | {"targets": [asdict(result) for result in results]}
        )
    else:
        columns = [column for column in asdict(results[0]) if column != "findings"]
        show_table(columns, [[asdict(result)[column] for column in columns] for result in results])
    if not all(result.is_clean for result in results):
        sys.exit(1)


def _check(
    seconds: float | None,
    inputs: int,
    seed: int,
    corpus: Path | None,
    keep: Path | None,
    malformed_frames: int | None,
) -> None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise SettingsError(
            f"--seconds is {seconds:g}", "it is a number above 0, or left out for 60"
        )
    if inputs < 0:
        raise SettingsError(
            f"--inputs is {inputs}", "it is a number above 0, or left out for no limit"
        )
    if seed < 0:
        raise SettingsError(f"--seed is {seed}", "seeds begin with 0")
    if corpus is not None and not corpus.is_dir():
        raise SettingsError(
            f"--corpus is {corpus}, which is no directory", "name one with files like wire.txt"
        )
    if malformed_frames is None:
        return
    if malformed_frames < 1:
        raise SettingsError(f"--malformed-frames is {malformed_frames}", "it is a number above 0")
    guided = {"--seconds": seconds, "--inputs": inputs, "--corpus": corpus, "--keep": keep}
    for option, value in guided.items():
        if value:
            raise SettingsError(
                f"{option} does not go with --malformed-frames",
                "leave one of them out: only coverage has use for it",
            )


def _tell(result: FuzzResult) -> None:
    for found in result.findings:
        note(
            f"{result.target}: {found['kind']}, input {found['input'] or '(none)'}\n{found['said']}"
        )
    note(
        f"{result.target}: {counted(result.inputs, 'input')}, {counted(len(result.findings), 'finding')}"
    )
