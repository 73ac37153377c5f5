"""`kvkeep bench NAME` runs the function `run` of one module and shows its figures, with the machine
they belong to.

A benchmark's options are the keyword arguments of its `run`; a parameter of `run` without a default
is an argument, not an option. `add_bench` adds a benchmark. Its module is imported when it is asked
for, because some need packages that only development has."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kvkeep import __version__
from kvkeep.bench.figures import with_unit
from kvkeep.cli.output import APP, Json, note, show_facts, show_json, show_table
from kvkeep.errors import SettingsError
from kvkeep.units import KIB, format_size, parse_size


@dataclass(frozen=True)
class Bench:
    """A benchmark: the module whose `run` measures, and what it measures in one line."""

    module: str
    help: str


BENCHES: dict[str, Bench] = {}

# What an option of this name means in every benchmark; a module's own OPTIONS go first.
OPTIONS: dict[str, str] = {
    "block_bytes": "Sizes of a block to measure, with commas between.",
    "blocks": "How many blocks.",
    "bytes": "How much is stored.",
    "connectors": "Connectors to measure, with commas between.",
    "device": "cpu, or cuda (cuda:1, ...) to measure on a GPU.",
    "eager": "Let engines start each kernel alone.",
    "geometries": "Models to measure, with commas between.",
    "hit_repeats": "How many prompts of each length.",
    "hit_tokens": "Tokens in a prompt of the hits, with commas between.",
    "hits": "Measure hits in an engine, too; --no-hits: leave them out.",
    "interleave": "Let engines take turns.",
    "model": "Folder of a checkpoint.",
    "policy": "Policies to compare, with commas between.",
    "prompt_tokens": "Tokens in a prompt.",
    "repeats": "How often each way is measured.",
    "resident": "How many blocks are in the cache meanwhile, with commas between.",
    "rounds": "How often each case is measured.",
    "tier": "The tier to measure. Nothing that is in its directory is touched.",
    "total_bytes": "How much is moved in a round.",
    "trace": "File of requests.",
}

app = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine. Options of each are in its --help.",
    **APP,
)


class BenchCommand(TyperCommand):
    """Has the arguments and options of the benchmark's `run` beside --json."""

    @cached_property
    def _of_run(self) -> list[Any]:
        assert self.name is not None
        return params_of(_load(self.name))

    def get_params(self, ctx: Any) -> list[Any]:
        return [*self._of_run, *super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = [*args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> None:
        assert self.name is not None
        options = dict(ctx.params)
        as_json = options.pop("json")
        measure(self.name, options, ctx.obj, as_json)


def params_of(module: ModuleType) -> list[Any]:
    """What typer makes of the arguments of `run`."""
    meanings = {**OPTIONS, **getattr(module, "OPTIONS", {})}
    parameters = []
    for name, given in inspect.signature(module.run).parameters.items():
        default, kind = given.default, typer.Option(help=meanings[name])
        if default is given.empty:
            kind = typer.Argument(help=meanings[name])
        elif not isinstance(default, bool):
            kind.parser, kind.metavar = _parser(name, default), "VALUE"
            default = _text(default, name)
        annotation: Any = Annotated[bool if isinstance(default, bool) else str, kind]
        at = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, at, default=default, annotation=annotation))

    def run() -> None: ...

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    made = typer.Typer(**APP)
    made.command()(run)
    params: list[Any] = typer.main.get_command(made).params
    return params


def add_bench(name: str, module: str, help: str) -> None:
    """Adds `kvkeep bench NAME`."""

    def command(json: Json = False) -> None: ...

    BENCHES[name] = Bench(module, help)
    command.__doc__ = help
    app.command(name, cls=BenchCommand)(command)


def measure(name: str, options: Mapping[str, Any], argv: Sequence[str], as_json: bool) -> None:
    """Runs one benchmark and prints its result."""
    command = shlex.join(["kvkeep", "bench", name, *argv])
    on = machine()
    note(f"$ {command}")
    note(", ".join(f"{fact}: {value}" for fact, value in on.items()))
    try:
        result: dict[str, Any] = _load(name).run(**options)
    except MemoryError:
        raise SettingsError(
            "this machine has not enough memory for that", "use smaller numbers"
        ) from None
    if as_json:
        show_json({**result, "machine": on, "command": command})
    else:
        show(result)


def machine() -> dict[str, str | int]:
    """What a benchmark ran on: processor, cores that this process may use, memory, and versions.
    Nothing names the machine."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "python": platform.python_version(),
        "kvkeep": __version__,
    }


def _memory() -> str:
    total = _field("/proc/meminfo", "MemTotal").split()
    return format_size(int(total[0]) * KIB) if total else "unknown"


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def show(result: Mapping[str, Any]) -> None:
    """Any result: single values in lines, then a table for each list of rows and each mapping.
    Lists and mappings inside a row, such as samples, are for JSON alone."""
    facts = [(key, with_unit(key, value)) for key, value in result.items() if not _is_table(value)]
    tables = [(key, value) for key, value in result.items() if _is_table(value) and value]
    if facts:
        show_facts(facts)
    for number, (key, value) in enumerate(tables):
        if facts or number:
            print()
        if isinstance(value, list):
            _show_rows(value)
        elif any(_is_table(each) for each in value.values()):
            show(value)
        else:
            rows = [(name, with_unit(name, each, key)) for name, each in value.items()]
            show_table((key, ""), rows)


def _show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = dict.fromkeys(
        column
        for row in rows
        for column, value in row.items()
        if not isinstance(value, list | tuple | dict)
    )
    cells = [[with_unit(column, row.get(column)) for column in columns] for row in rows]
    show_table(list(columns), cells)


def _is_table(value: Any) -> bool:
    """A mapping, or a list of mappings."""
    rows = value if isinstance(value, list) and value else [None]
    return isinstance(value, dict) or all(isinstance(row, dict) for row in rows)


def _parser(name: str, default: Any) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            return _convert(name, default, text)
        except ValueError:
            raise typer.BadParameter(f"expected {_expected(name, default)}") from None

    return value


def _convert(name: str, default: Any, text: str) -> Any:
    """`text` as a value of the default's type; what has several values takes them with commas
    between.

    Numbers count something, so there is at least one of it, except where not even the default is
    one."""
    if isinstance(default, tuple | list):
        return type(default)(_convert(name, default[0], part) for part in text.split(","))
    if isinstance(default, int | float):
        value = parse_size(text) if name.endswith("bytes") else type(default)(text)
        if not value >= min(default, 1):
            raise ValueError
        return value
    if not text:
        raise ValueError
    return text


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(BENCHES[name].module)
    except ImportError as error:
        raise SettingsError(
            f"benchmark {name} cannot be loaded: {error}",
            "install kvkeep[engine], or set up a checkout with `make setup`",
        ) from error


def _expected(name: str, default: Any) -> str:
    """What a value looks like: "at least 1, such as 8"."""
    first = default[0] if isinstance(default, tuple | list) else default
    number = isinstance(first, int | float)
    return (f"at least {min(first, 1)}, such as " if number else "a value such as ") + _text(
        default, name
    )


def _text(value: Any, name: str) -> str:
    """The value of the option `name` as it could be given."""
    if isinstance(value, tuple | list):
        return ",".join(_text(each, name) for each in value)
    return format_size(value) if name.endswith("bytes") else str(value)


add_bench("lookup", "kvkeep.bench.lookup", "How long a lookup takes, against a ping.")
add_bench(
    "transfer",
    "kvkeep.bench.transfer",
    "How fast blocks are stored and loaded, against a plain copy.",
)
add_bench(
    "restart",
    "kvkeep.bench.restart",
    "How soon a killed server serves again, and what it still has.",
)
add_bench(
    "tier",
    "kvkeep.bench.tier",
    "How fast a tier writes and reads, against fio or the client library.",
)
add_bench(
    "replay",
    "kvkeep.bench.replay",
    "Hit rate and disk writes of each cache size and policy on a trace of requests.",
)
add_bench(
    "vllm",
    "kvkeep.bench.vllm",
    "Time to the first token of real vLLM, without a connector, with kvkeep and with peers.",
)
for _more in entry_points(group="kvkeep.benches"):  # a checkout adds those of development
    _more.load()()
