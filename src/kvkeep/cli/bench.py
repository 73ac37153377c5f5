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
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand

from kvkeep import __version__
from kvkeep.bench.figures import with_unit
from kvkeep.cli.output import APP, Json, help_section, note, show_facts, show_json, show_table
from kvkeep.errors import SettingsError
from kvkeep.units import KIB, format_size, parse_size


@dataclass(frozen=True)
class Bench:
    """A benchmark: the module whose `run` measures, and what it measures in one line."""

    module: str
    help: str


BENCHES: dict[str, Bench] = {}
_REQUIRED = inspect.Parameter.empty

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
    """Adds the options of the benchmark's `run` to the help page."""

    def get_help(self, ctx: Any) -> str:
        assert self.name is not None
        module = _load(self.name)
        meanings = {**OPTIONS, **getattr(module, "OPTIONS", {})}
        rows = [
            (_argument(name), f"{meanings[name]} [required]")
            if default is _REQUIRED
            else (_flag(name), f"{meanings[name]} [default: {_text(default, name)}]")
            for name, default in options_of(module.run).items()
        ]
        return help_section(super().get_help(ctx), "Options of this benchmark", rows)


def add_bench(name: str, module: str, help: str) -> None:
    """Adds `kvkeep bench NAME`."""

    def command(context: typer.Context, json: Json = False) -> None:
        measure(name, context.args, json)

    BENCHES[name] = Bench(module, help)
    command.__doc__ = help
    extra = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, cls=BenchCommand, context_settings=extra)(command)


def measure(name: str, argv: Sequence[str], as_json: bool) -> None:
    """Runs one benchmark and prints its result."""
    module = _load(name)
    options = read_options(module.run, argv)
    command = shlex.join(["kvkeep", "bench", name, *argv, *["--json"] * as_json])
    on = machine()
    note(f"$ {command}")
    note(", ".join(f"{fact}: {value}" for fact, value in on.items()))
    try:
        result: dict[str, Any] = module.run(**options)
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


def read_options(run: Callable[..., Any], argv: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--switch` and `--no-switch` as keyword arguments of
    `run`, and what is no option as its parameters without a default, in their order."""
    parameters = inspect.signature(run).parameters
    required = [name for name, default in options_of(run).items() if default is _REQUIRED]
    options: dict[str, Any] = {}
    rest = iter(argv)
    for argument in rest:
        if required and not argument.startswith("--"):
            options[required.pop(0)] = argument
            continue
        flag, equals, text = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_off = flag.startswith("--no-") and isinstance(
            _default(parameters, name.removeprefix("no_")), bool
        )
        if is_off and not equals:
            options[name.removeprefix("no_")] = False
            continue
        if not flag.startswith("--") or _default(parameters, name) in (None, _REQUIRED):
            defaults = options_of(run)
            known = ", ".join(_flag(each) for each in defaults if defaults[each] is not _REQUIRED)
            known = known or "none"
            raise SettingsError(f'unknown option "{flag}"', f"options of this benchmark: {known}")
        default = parameters[name].default
        if isinstance(default, bool) and not equals:
            options[name] = True
            continue
        text = text if equals else next(rest, "")
        try:
            options[name] = _convert(name, default, text)
        except ValueError:
            raise SettingsError(f'{flag} "{text}": expected {_expected(name, default)}') from None
    if required:
        raise SettingsError(f"{_argument(required[0])} is missing", "--help says what it is")
    return options


def _convert(name: str, default: Any, text: str) -> Any:
    """`text` as a value of the default's type; what has several values takes them with commas
    between.

    Numbers count something, so there is at least one of it, except where not even the default is
    one."""
    if isinstance(default, tuple | list):
        return type(default)(_convert(name, default[0], part) for part in text.split(","))
    if isinstance(default, bool):
        if text not in (switch := {"true": True, "1": True, "false": False, "0": False}):
            raise ValueError
        return switch[text]
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


def _default(parameters: Mapping[str, inspect.Parameter], name: str) -> Any:
    return parameters[name].default if name in parameters else None


def options_of(run: Callable[..., Any]) -> dict[str, Any]:
    """Name and default of each option; _REQUIRED for an argument."""
    return {
        name: parameter.default for name, parameter in inspect.signature(run).parameters.items()
    }


def _argument(name: str) -> str:
    return name.upper()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _expected(name: str, default: Any) -> str:
    """What a value looks like: "at least 1, such as 8"."""
    first = default[0] if isinstance(default, tuple | list) else default
    if isinstance(first, bool):
        return "true or false"
    number = isinstance(first, int | float)
    return (f"at least {min(first, 1)}, such as " if number else "a value such as ") + _text(
        default, name
    )


def _text(value: Any, name: str) -> str:
    """The value of the option `name` as it could be given."""
    if isinstance(value, tuple | list):
        return ",".join(_text(each, name) for each in value)
    if name.endswith("bytes"):
        return format_size(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


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
