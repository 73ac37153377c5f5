"""`kvkeep engine-fuzz`: random lives of the reference engine under faults, judged by an engine
without a cache."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvkeep.cli.output import Json, counted, note, show_json
from kvkeep.errors import SettingsError
from kvkeep_lab.commands.seeds import SHOWN_VIOLATIONS, Jobs, Seed, Seeds, chosen, sweep

_MODELS = ("oracle", "gqa", "mla")


def engine_fuzz(
    seed: Seed = None,
    seeds: Seeds = None,
    model: Annotated[
        str, typer.Option(help="oracle checks every byte; gqa and mla are small transformers.")
    ] = "oracle",
    jobs: Jobs = 0,
    json: Json = False,
) -> None:
    """Run random schedules under faults; the tokens must be those without a cache. Exit code 1 if
    they are not."""
    if model not in _MODELS:
        raise SettingsError(f"--model is {model!r}", f"allowed are {', '.join(_MODELS)}")
    span = chosen(seed, seeds)
    runs = [(each, model) for each in span]
    started = time.monotonic()
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    for result in sweep(_run, runs, jobs):
        if "violation" in result:
            violations.append(result)
            note(f"violation: {result['violation']}")
            note(f"replay: kvkeep engine-fuzz --model {model} --seed {result['seed']}")
        else:
            faults.update(result.pop("faults"))
            totals.update({name: count for name, count in result.items() if name != "seed"})
    outcome = {
        "model": model,
        "seeds": f"{span.start}:{span.stop}",
        "runs": len(span),
        **totals,
        "faults": dict(faults),
        "violations": violations[:SHOWN_VIOLATIONS],
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
    happened = ", ".join(
        f"{name.replace('_', ' ')} {count:,}" for name, count in outcome["faults"].items() if count
    )
    print(f"what happened on the way: {happened or 'nothing'}")
    print(
        counted(outcome["violation_count"], "violation")
        if outcome["violation_count"]
        else "every answer is right"
    )


def _run(what: tuple[int, str]) -> dict[str, Any]:
    from kvkeep_lab.fuzz.engine import Fuzz, Violation

    seed, model = what
    try:
        return asdict(Fuzz(seed, model).run())
    except Violation as violation:
        return {"seed": seed, "violation": str(violation)}
    except Exception as error:
        # guard: whatever it is, it is a finding, and the other seeds still run
        place = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return {
            "seed": seed,
            "violation": f"seed {seed}, model {model}: {type(error).__name__}: {error}\n{place}",
        }
