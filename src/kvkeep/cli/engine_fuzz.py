"""`kvkeep engine-fuzz`: random lives of the reference engine under faults, judged by an engine without a cache."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvkeep.cli.output import Json, counted, note, show_json
from kvkeep.errors import SettingsError

_MODELS = ("oracle", "gqa", "mla")
_PROGRESS_EVERY_S = 2.0
_SHOWN_VIOLATIONS = 10


def engine_fuzz(
    seed: Annotated[int | None, typer.Option(help="Run this one seed, in this process.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Run these seeds: FIRST:END, without END itself; 0:100 if neither is given.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="oracle checks every byte; gqa and mla are small transformers.")
    ] = "oracle",
    jobs: Annotated[int, typer.Option(help="Processes. 0: one for each core.")] = 0,
    json: Json = False,
) -> None:
    """Run random schedules under faults; the tokens must be those without a cache. Exit code 1 if they are not."""
    if model not in _MODELS:
        raise SettingsError(f"--model is {model!r}", f"allowed are {', '.join(_MODELS)}")
    if jobs < 0:
        raise SettingsError(f"--jobs is {jobs}", "write 0 for one process for each core")
    if seed is not None and seed < 0:
        raise SettingsError(f"--seed is {seed}", "seeds count from 0")
    if seed is not None and seeds is not None:
        raise SettingsError("--seed and --seeds contradict each other", "leave one of them out")
    span = range(seed, seed + 1) if seed is not None else _span(seeds or "0:100")
    started = time.monotonic()
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    last_word = started
    for done, result in enumerate(_results(span, model, 1 if seed is not None else jobs), start=1):
        if "violation" in result:
            violations.append(result)
            note(f"violation: {result['violation']}")
            note(f"replay: kvkeep engine-fuzz --model {model} --seed {result['seed']}")
        else:
            faults.update(result.pop("faults"))
            totals.update({name: count for name, count in result.items() if name != "seed"})
        if time.monotonic() - last_word > _PROGRESS_EVERY_S:
            last_word = time.monotonic()
            note(f"{done:,} of {counted(len(span), 'run')}, {counted(len(violations), 'violation')}")
    outcome = {
        "model": model,
        "seeds": f"{span.start}:{span.stop}",
        "runs": len(span),
        **totals,
        "faults": dict(faults),
        "violations": violations[:_SHOWN_VIOLATIONS],
        "violation_count": len(violations),
        "seconds": round(time.monotonic() - started, 1),
    }
    if json:
        show_json(outcome)
    else:
        _show(outcome)
    if violations:
        sys.exit(1)


def _show(outcome: dict[str, Any]) -> None:
    print(
        f"{counted(outcome['runs'], 'run')} ({outcome['model']}, seeds {outcome['seeds']}) in {outcome['seconds']} s: "
        f"{counted(outcome.get('requests', 0), 'request')}, {counted(outcome.get('tokens', 0), 'token')}, "
        f"{counted(outcome.get('external_cached_tokens', 0), 'token')} from the cache"
    )
    happened = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in outcome["faults"].items() if count)
    print(f"what happened on the way: {happened or 'nothing'}")
    print(counted(outcome["violation_count"], "violation") if outcome["violation_count"] else "every answer is right")


def _span(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise SettingsError(f"--seeds is {text!r}", "write FIRST:END, for example 0:1000")
    return range(int(first), int(end))


def _results(span: range, model: str, jobs: int) -> Iterator[dict[str, Any]]:
    jobs = min(jobs or os.cpu_count() or 1, len(span))
    if jobs == 1:
        _prepare()
        yield from (_run((seed, model)) for seed in span)
        return
    context = multiprocessing.get_context("spawn")  # a fork would take torch's threads along, half
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        yield from pool.map(_run, [(seed, model) for seed in span], chunksize=4)


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)  # these models are so small that threads only wait for each other
    logging.disable(logging.CRITICAL)  # the faults are wanted


def _run(what: tuple[int, str]) -> dict[str, Any]:
    from kvkeep.testing.engine_fuzz import Fuzz, Violation

    seed, model = what
    try:
        return asdict(Fuzz(seed, model).run())
    except Violation as violation:
        return {"seed": seed, "violation": str(violation)}
    except Exception as error:  # guard: whatever it is, it is a finding, and the other seeds still run
        place = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return {"seed": seed, "violation": f"seed {seed}, model {model}: {type(error).__name__}: {error}\n{place}"}
