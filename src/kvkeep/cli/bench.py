"""`kvkeep bench NAME`: runs `kvkeep.bench.NAME.run` and shows its numbers, with the machine they belong to.

A benchmark's options are the keyword arguments of its `run`, so a new one needs no more than its name here. Modules
are imported when they are asked for: some need what only development has.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Final

import typer
from rich.console import RenderableType
from typer.core import TyperCommand

from kvkeep.bench.figures import with_unit
from kvkeep.cli import machine
from kvkeep.cli.output import Json, console, help_section, note, show_facts, show_json, show_table
from kvkeep.errors import SettingsError
from kvkeep.units import format_size, parse_size

BENCHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lookup": "How long a lookup takes, against a ping.",
        "transfer": "How fast blocks are stored and loaded, against a plain copy.",
        "index": "What a resident block costs in memory, and how fast blocks come and go.",
        "turns": "How long the server's loop is held, by which request.",
        "restart": "How soon a server that was killed serves again, and what is still there.",
        "security": "What keys cost, and what time tells one tenant about another.",
        "checksum": "How fast checksums are taken.",
        "copy": "How fast blocks are gathered and scattered, with and without a checksum on the way.",
        "keys": "What a block's key costs, for each hash we could have taken.",
        "engine": "What a cache costs an engine that finds nothing in it, and saves one that does.",
        "vllm": "Time to the first token of real vLLM, without a connector, with kvkeep's and with its peers.",
        "vllm-load": "Throughput and pace of decoding of real vLLM under load, with the same connectors.",
        "vllm-paused": "Throughput of real vLLM while the server hangs, against none.",
        "chart": "Draws what transfer, vllm or vllm-load measured, as an SVG file.",
    }
)

# What an option of this name means, in whichever benchmark it is; one may have OPTIONS of its own that go before.
OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "block_bytes": "Sizes of a block to measure, with commas between.",
        "block_tokens": "Tokens in a block.",
        "blocks": "How many blocks.",
        "bytes": "How much is stored.",
        "case": "Which of several cases.",
        "connectors": "Connectors to measure, with commas between.",
        "device": "cpu, or cuda (cuda:1, ...) to measure the kernel on a GPU too.",
        "eager": "Let engines start each kernel alone.",
        "file": "A file to read.",
        "floor_gbps": "What a plain copy reaches.",
        "geometries": "Models to measure, with commas between.",
        "interleave": "Let engines take turns.",
        "layers": "Layers that a block is spread over.",
        "model": "Folder of a checkpoint.",
        "out": "A file to write.",
        "prompt_tokens": "Tokens in a prompt.",
        "prompts": "How many prompts are served together.",
        "repeats": "How often each way is measured.",
        "requests": "How many requests.",
        "resident": "How many blocks are in the cache meanwhile, with commas between.",
        "rounds": "How often each case is measured.",
        "scenarios": "What is measured, with commas between.",
        "seconds": "For how long.",
        "seed": "Where random numbers begin.",
        "threads": "Threads that the model computes with.",
        "title": "What stands above.",
        "token_bytes": "KV of one token.",
        "total_bytes": "How much is moved in a round.",
        "trials": "Blocks that are damaged, for each kind of damage.",
    }
)

app = typer.Typer(no_args_is_help=True, help="Measure this machine. Options of each are in its --help.")


class BenchCommand(TyperCommand):
    """Adds the options of the benchmark's `run` to the help page."""

    def get_help(self, ctx: Any) -> str:
        assert self.name is not None
        module = _load(self.name)
        meanings = {**OPTIONS, **getattr(module, "OPTIONS", {})}
        rows = [
            (_flag(name), f"{meanings[name]} [default: {_text(default, name)}]")
            for name, default in options_of(module.run).items()
        ]
        return help_section(super().get_help(ctx), "Options of this benchmark", rows)


def _add(name: str) -> None:
    def command(context: typer.Context, json: Json = False) -> None:
        measure(name, context.args, json)

    command.__doc__ = BENCHES[name]
    extra = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, cls=BenchCommand, context_settings=extra)(command)


for _bench in BENCHES:
    _add(_bench)


def measure(name: str, argv: Sequence[str], as_json: bool) -> None:
    """Runs one benchmark and prints its result."""
    module = _load(name)
    options = read_options(module.run, argv)
    command = shlex.join(["kvkeep", "bench", name, *argv, *["--json"] * as_json])
    on = machine.describe()
    note(f"$ {command}")
    note(", ".join(f"{fact}: {value}" for fact, value in on.items()))
    try:
        result: dict[str, Any] = module.run(**options)
    except MemoryError:
        raise SettingsError("this machine has not enough memory for that", "use smaller numbers") from None
    if as_json:
        show_json({**result, "machine": on, "command": command})
    elif hasattr(module, "table"):
        rendered: RenderableType = module.table(result)
        console().print(rendered)
    else:
        show(result)


def show(result: Mapping[str, Any]) -> None:
    """Any result: single values in lines, then a table for each list of rows and each mapping."""
    facts = [(key, with_unit(key, value)) for key, value in result.items() if not _is_table(value)]
    tables = [(key, value) for key, value in result.items() if _is_table(value)]
    if facts:
        show_facts(facts)
    for number, (key, value) in enumerate(tables):
        if facts or number:
            print()
        if isinstance(value, dict):
            show_table((key, ""), [(name, with_unit(name, each, key)) for name, each in value.items()])
        else:
            columns = list(dict.fromkeys(column for row in value for column in row))
            show_table(columns, [[with_unit(column, row.get(column)) for column in columns] for row in value])


def _is_table(value: Any) -> bool:
    rows = value if isinstance(value, list) and value else [None]
    return isinstance(value, dict) or all(isinstance(row, dict) for row in rows)


def read_options(run: Callable[..., Any], argv: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--switch` and `--no-switch` as keyword arguments of `run`."""
    parameters = inspect.signature(run).parameters
    options: dict[str, Any] = {}
    rest = iter(argv)
    for argument in rest:
        flag, equals, text = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_off = flag.startswith("--no-") and isinstance(_default(parameters, name.removeprefix("no_")), bool)
        if is_off and not equals:
            options[name.removeprefix("no_")] = False
            continue
        if not flag.startswith("--") or name not in parameters:
            known = ", ".join(map(_flag, options_of(run))) or "none"
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
    return options


def _convert(name: str, default: Any, text: str) -> Any:
    """`text` as a value of the default's type; what has several values takes them with commas between.

    Numbers count something, so there is at least one of it, except where not even the default is one.
    """
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
    """Imports by name, where `test_tidy` sees that they are used."""
    try:
        match name:
            case "lookup":
                from kvkeep.bench import lookup

                return lookup
            case "transfer":
                from kvkeep.bench import transfer

                return transfer
            case "index":
                from kvkeep.bench import index

                return index
            case "turns":
                from kvkeep.bench import turns

                return turns
            case "restart":
                from kvkeep.bench import restart

                return restart
            case "security":
                from kvkeep.bench import security

                return security
            case "checksum":
                from kvkeep.bench import checksum

                return checksum
            case "copy":
                from kvkeep.bench import copy

                return copy
            case "engine":
                from kvkeep.bench import engine

                return engine
            case "vllm":
                from kvkeep.bench import vllm

                return vllm
            case "vllm-load":
                from kvkeep.bench import vllm_load

                return vllm_load
            case "vllm-paused":
                from kvkeep.bench import vllm_paused

                return vllm_paused
            case "chart":
                from kvkeep.bench import chart

                return chart
            case _:
                from kvkeep.bench import keys

                return keys
    except ImportError as error:
        raise SettingsError(
            f"benchmark {name} cannot be loaded: {error}", "install kvkeep[engine], or kvkeep[dev] for all of them"
        ) from error


def _default(parameters: Mapping[str, inspect.Parameter], name: str) -> Any:
    return parameters[name].default if name in parameters else None


def options_of(run: Callable[..., Any]) -> dict[str, Any]:
    """Name and default of each option."""
    return {name: parameter.default for name, parameter in inspect.signature(run).parameters.items()}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _expected(name: str, default: Any) -> str:
    """What a value looks like: "at least 1, such as 8"."""
    first = default[0] if isinstance(default, tuple | list) else default
    if isinstance(first, bool):
        return "true or false"
    number = isinstance(first, int | float)
    return (f"at least {min(first, 1)}, such as " if number else "a value such as ") + _text(default, name)


def _text(value: Any, name: str) -> str:
    """The value of the option `name` as it could be given."""
    if isinstance(value, tuple | list):
        return ",".join(_text(each, name) for each in value)
    if name.endswith("bytes"):
        return format_size(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
