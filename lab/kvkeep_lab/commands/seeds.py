"""Runs by seed, on all cores: what `kvkeep chaos` and `kvkeep engine-fuzz` share."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any, TypeVar

import typer

from kvkeep.cli.output import counted, note
from kvkeep.errors import SettingsError

T = TypeVar("T")
R = TypeVar("R")

_AT_A_TIME = 4  # seeds that a process takes
_PROGRESS_EVERY_S = 2.0
SHOWN_VIOLATIONS = 10

Seed = Annotated[int | None, typer.Option(help="Run this one seed, in this process.")]
Seeds = Annotated[
    str | None,
    typer.Option(help="Run these seeds: FIRST:END, without END itself; 0:100 if neither is given."),
]
Jobs = Annotated[int, typer.Option(help="Processes. 0: one for each core.")]


def chosen(seed: int | None, seeds: str | None) -> range:
    """The seeds that the options ask for."""
    if seed is not None and seeds is not None:
        raise SettingsError("--seed and --seeds contradict each other", "leave one of them out")
    if seed is not None and seed < 0:
        raise SettingsError(f"--seed is {seed}", "seeds count from 0")
    return range(seed, seed + 1) if seed is not None else span(seeds or "0:100")


def span(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise SettingsError(f"--seeds is {text!r}", "write FIRST:END, for example 0:1000")
    return range(int(first), int(end))


def in_processes(
    run: Callable[[T], R], items: Sequence[T], jobs: int, at_a_time: int = _AT_A_TIME
) -> Iterator[R]:
    """The result of each item, in their order. One job: in this process."""
    if jobs < 0:
        raise SettingsError(f"--jobs is {jobs}", "write 0 for one process for each core")
    jobs = min(jobs or os.cpu_count() or 1, len(items))
    if jobs == 1:
        prepare()
        yield from map(run, items)
        return
    context = multiprocessing.get_context("spawn")  # a fork would take torch's threads along, half
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare) as pool:
        yield from pool.map(run, items, chunksize=at_a_time)


def sweep(
    run: Callable[[T], dict[str, Any]], items: Sequence[T], jobs: int
) -> Iterator[dict[str, Any]]:
    """As `in_processes`, with a line of progress now and then. A result with a `violation` counts
    as one."""
    violations, last_word_s = 0, time.monotonic()
    for done, result in enumerate(in_processes(run, items, jobs), start=1):
        violations += bool(result.get("violation"))
        yield result
        if time.monotonic() - last_word_s > _PROGRESS_EVERY_S:
            last_word_s = time.monotonic()
            said = counted(violations, "violation")
            note(f"{done:,} of {counted(len(items), 'run')}, {said}")


def prepare() -> None:
    """Makes a process fit for runs."""
    import torch

    torch.set_num_threads(1)  # these models are so small that threads only wait for each other
    logging.disable(logging.CRITICAL)  # the faults are wanted
    gc.freeze()
