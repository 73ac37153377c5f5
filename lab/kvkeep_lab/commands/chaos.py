"""`kvkeep chaos`: whole clusters in simulated time under faults of every kind, replayable from a
seed alone."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvkeep.cli.output import Json, counted, note, show_facts, show_json, show_table
from kvkeep.errors import SettingsError
from kvkeep_lab.commands.seeds import (
    SHOWN_VIOLATIONS,
    Jobs,
    Seed,
    Seeds,
    chosen,
    in_processes,
    prepare,
    sweep,
)

_SHRUNK = 2  # violations that are made small; the others are only named
_SEEDS_A_MUTANT = 200
_MINUTES_AT_MOST = 24 * 60
# A mutant that raises one of these does not fit the code any more.
_OUTDATED = ("TypeError", "AttributeError", "KeyError: '")


def chaos(
    seed: Seed = None,
    seeds: Seeds = None,
    without: Annotated[
        str,
        typer.Option(
            help="With --seed: leave these items of its plan out: numbers and FIRST:END, without END itself, "
            "for example 2,5:9."
        ),
    ] = "",
    story: Annotated[
        bool, typer.Option(help="With --seed: print what happens, event by event.")
    ] = False,
    mutant: Annotated[str, typer.Option(help="Run with this bug planted.")] = "",
    mutants: Annotated[
        bool,
        typer.Option(help="Plant one bug after the other, and find the seed that notices each."),
    ] = False,
    real: Annotated[
        bool,
        typer.Option(help="Real processes, signals and shared memory instead of a simulation."),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="With --real: duration of the faults; 10 if not given.")
    ] = None,
    jobs: Jobs = 0,
    json: Json = False,
) -> None:
    """Run engines, clients and servers in simulated time under faults. Exit code 1 if anything was
    wrong."""
    if real:
        if seeds is not None or mutant or mutants or without or story or jobs:
            raise SettingsError(
                "--real takes --minutes, --seed and --json only", "leave the others out"
            )
        _with_real_processes(seed or 0, 10.0 if minutes is None else minutes, json)
        return
    if minutes is not None:
        raise SettingsError("--minutes is for --real", "say --real, or leave it out")
    if mutants:
        if seed is not None or mutant or without or story:
            raise SettingsError(
                "--mutants takes --seeds, --jobs and --json only", "leave the others out"
            )
        _hunt(chosen(None, seeds or f"0:{_SEEDS_A_MUTANT}"), jobs, json)
        return
    _check_mutant(mutant)
    if seed is None and (without or story):
        raise SettingsError("--without and --story are for one run", "say which with --seed")
    span = chosen(seed, seeds)
    if seed is not None and (without or story):
        _replay(seed, without, story, mutant, json)
        return
    _sweep(span, mutant, jobs, json)


def _sweep(span: range, mutant: str, jobs: int, json: bool) -> None:
    """All seeds of a range. The first violations are shrunk to short stories."""
    started = time.monotonic()
    outcomes: list[dict[str, Any]] = []
    violations: list[dict[str, Any]] = []
    for outcome in sweep(_run, [(each, mutant) for each in span], jobs):
        outcomes.append(outcome)
        if outcome["violation"]:
            violations.append(_explained(outcome, mutant, shrink=len(violations) < _SHRUNK))
    totals = _totals(outcomes, time.monotonic() - started)
    totals["violations"] = violations[:SHOWN_VIOLATIONS]
    if json:
        show_json(totals)
    else:
        _show(totals, span)
    if violations:
        sys.exit(1)


def numbers_in(text: str, items: int) -> list[int]:
    """`2,5:9` is 2, 5, 6, 7, 8, where there are at least so many items."""
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"\s*([0-9]{1,18})\s*(?::\s*([0-9]{1,18})\s*)?", part)
        first, end = (int(found[1]), int(found[2] or int(found[1]) + 1)) if found else (0, 0)
        if first >= end:
            raise SettingsError(
                f"--without is {text!r}: {part.strip()!r} names no item",
                "write numbers and FIRST:END, without END itself, with commas between: 2,5:9 is 2, 5, 6, 7 and 8",
            )
        if end > items:
            raise SettingsError(
                f"--without is {text!r}: the plan has {counted(items, 'item')}",
                f"its items have the numbers from 0 to {items - 1}",
            )
        numbers += range(first, end)
    return numbers


def as_text(numbers: list[int]) -> str:
    """The inverse of `numbers_in`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number:
            parts[-1][1] += 1
        else:
            parts.append([number, number + 1])
    return ",".join(str(first) if end == first + 1 else f"{first}:{end}" for first, end in parts)


def _run(what: tuple[int, str]) -> dict[str, Any]:
    """One seed, in whatever process. Its story comes along only if something was wrong."""
    from kvkeep_lab.chaos.mutants import planted
    from kvkeep_lab.chaos.plan import draw
    from kvkeep_lab.chaos.run import ChaosRun

    seed, mutant = what
    with planted(mutant):
        outcome = asdict(ChaosRun(draw(seed)).run())
    if not outcome["violation"]:
        outcome["story"] = []
    return outcome


def _totals(outcomes: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    from kvkeep_lab.chaos.plan import FAULTS
    from kvkeep_lab.chaos.record import FINDINGS

    faults: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))
    for outcome in outcomes:
        faults.update(outcome["faults"])
    findings = {name: sum(each["finding"] == name for each in outcomes) for name in FINDINGS}
    broken_rules = findings.pop("broken_rules")
    return {
        "runs": len(outcomes),
        "requests": sum(each["requests"] for each in outcomes),
        "events": sum(each["events"] for each in outcomes),
        "faults": dict(faults),
        **findings,
        "seconds": round(seconds, 1),
        "broken_rules": broken_rules,
        "finished_requests": sum(each["finished"] for each in outcomes),
        "hit_blocks": sum(each["hit_blocks"] for each in outcomes),
        "adopted_blocks": sum(each["adopted_blocks"] for each in outcomes),
        "written_blocks": sum(each["written_blocks"] for each in outcomes),
        "promoted_blocks": sum(each["promoted_blocks"] for each in outcomes),
        "runs_with_hosts": sum(each["hosts"] > 1 for each in outcomes),
        "tier_hits": sum(each["tier_hits"] for each in outcomes),
        "complete_clears": sum(each["clears"] for each in outcomes),
        "simulated_seconds": sum(each["simulated_ms"] for each in outcomes) // 1000,
    }


def _explained(outcome: dict[str, Any], mutant: str, *, shrink: bool) -> dict[str, Any]:
    """A violation for people: what, the shortest way to it, and how to see it again."""
    from kvkeep_lab.chaos.mutants import planted
    from kvkeep_lab.chaos.plan import draw
    from kvkeep_lab.chaos.shrink import shrink as made_small

    seed, left_out = outcome["seed"], ""
    note(f"violation: seed {seed}: {outcome['finding']}: {outcome['violation']}")
    story = outcome["story"]
    if shrink:
        note("looking for a shorter story of it")
        prepare()
        with planted(mutant):
            dropped, shortest = made_small(draw(seed), outcome["finding"])
        left_out, story = as_text(dropped), shortest.story
    replay = f"kvkeep chaos --seed {seed}" + (f" --without {left_out}" if left_out else "")
    replay += (f" --mutant {mutant}" if mutant else "") + " --story"
    note(f"replay: {replay}")
    found = {
        "seed": seed,
        "finding": outcome["finding"],
        "violation": outcome["violation"],
        "replay": replay,
    }
    return found | ({"story": story} if shrink else {})


def _replay(seed: int, left_out: str, story: bool, mutant: str, json: bool) -> None:
    """One run of what is left of a plan."""
    from kvkeep_lab.chaos.mutants import planted
    from kvkeep_lab.chaos.plan import draw
    from kvkeep_lab.chaos.run import ChaosRun

    started = time.monotonic()
    plan = draw(seed)
    without = numbers_in(left_out, len(plan.items))
    with planted(mutant):
        prepare()
        outcome = asdict(ChaosRun(plan.without(without), detailed=story).run())
    totals = _totals([outcome], time.monotonic() - started)
    totals["violations"] = [outcome["violation"]] if outcome["violation"] else []
    totals["story"] = outcome["story"] if story else []
    if json:
        show_json(totals)
    else:
        for line in totals["story"]:
            print(line)
        print(
            f"{outcome['finding']}: {outcome['violation']}"
            if outcome["violation"]
            else "nothing is wrong"
        )
    if outcome["violation"]:
        sys.exit(1)


def _with_real_processes(seed: int, minutes: float, json: bool) -> None:
    from kvkeep_lab.chaos.real import RealRun
    from kvkeep_lab.chaos.real_plan import Counts

    if not 0 < minutes <= _MINUTES_AT_MOST:
        raise SettingsError(
            f"--minutes is {minutes:g}", f"write a number above 0, {_MINUTES_AT_MOST} at most"
        )
    result = RealRun(seed, minutes * 60, Counts.of_minutes(minutes), on_progress=note).run()
    if json:
        show_json(result)
    else:
        show_facts(
            (name.replace("_", " "), str(value))
            for name, value in result.items()
            if name != "violations"
        )
    for violation in result["violations"]:
        note(f"violation: {violation}")
    if result["violations"]:
        sys.exit(1)


def _hunt(span: range, jobs: int, json: bool) -> None:
    """Every mutant is to be noticed by some seed. Exit code 1 if one is not."""
    from kvkeep_lab.chaos.mutants import MUTANTS

    started, caught = time.monotonic(), []
    for found in in_processes(_find, [(name, span) for name in MUTANTS], jobs, at_a_time=1):
        caught.append(found)
        note(
            f"{found['mutant']}: "
            + (f"seed {found['seed']}, {found['finding']}" if found["finding"] else "not noticed")
        )
    missed = [each["mutant"] for each in caught if not each["finding"]]
    if json:
        show_json(
            {
                "mutants": len(caught),
                "caught": len(caught) - len(missed),
                "missed": missed,
                "results": caught,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    else:
        show_table(
            ("mutant", "bug", "seed", "finding"),
            [
                (each["mutant"], each["bug"], each["seed"], each["finding"] or "not noticed")
                for each in caught
            ],
        )
    if missed:
        sys.exit(1)


def _find(what: tuple[str, range]) -> dict[str, Any]:
    """The first seed that notices a mutant."""
    from kvkeep_lab.chaos.mutants import MUTANTS

    name, span = what
    found: dict[str, Any] = {
        "mutant": name,
        "bug": MUTANTS[name].bug,
        "seed": None,
        "finding": "",
        "violation": "",
    }
    bad = next((outcome for seed in span if (outcome := _run((seed, name)))["violation"]), {})
    if any(error in bad.get("violation", "") for error in _OUTDATED):
        raise RuntimeError(f"the mutant {name} does not fit the code any more: {bad['violation']}")
    return found | {key: bad[key] for key in ("seed", "finding", "violation") if bad}


def _check_mutant(name: str) -> None:
    if name:
        from kvkeep_lab.chaos.mutants import MUTANTS

        if name not in MUTANTS:
            raise SettingsError(f"--mutant is {name!r}", f"there are {', '.join(MUTANTS)}")


def _show(totals: dict[str, Any], span: range) -> None:
    print(
        f"{counted(totals['runs'], 'run')} (seeds {span.start}:{span.stop}) in {totals['seconds']} s: "
        f"{counted(totals['requests'], 'request')}, {counted(totals['events'], 'event')}, "
        f"{counted(totals['simulated_seconds'], 'second')} of simulated time, "
        f"{counted(totals['hit_blocks'], 'block')} found in the cache"
    )
    show_table(("fault", "times"), sorted(totals["faults"].items()))
    names = (
        "wrong_tokens",
        "wrong_bytes",
        "engine_errors",
        "stuck_requests",
        "leaked_blocks",
        "leaked_leases",
    )
    show_facts((name.replace("_", " "), f"{totals[name]:,}") for name in (*names, "broken_rules"))
    for violation in totals["violations"]:
        for line in violation.get("story", ()):
            print(line)
