"""Answers on stdout, as tables for people or JSON for programs; everything else on stderr."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

_HELP_WIDTH = 110

# Of each app, because one that is imported on its own takes nothing from `kvkeep`.
APP: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}

Json = Annotated[bool, typer.Option("--json", help="Print only one JSON document on stdout.")]


def show_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table. Piped into a file it is not cut to the width of a terminal."""
    _print(table_of(columns, rows))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose numbers stand right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = [[_cell(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if numbers and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    _print(table)


def show_each(several: Iterable[Iterable[tuple[str, str]]]) -> None:
    """Facts of several things, with an empty line between them."""
    for number, facts in enumerate(several):
        if number:
            print()
        show_facts(facts)


def counted(number: int, noun: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print(table: Table) -> None:
    """Without the blanks that fill up the last column."""
    screen = console()
    with screen.capture() as drawn:
        screen.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def console() -> Console:
    width = None if sys.stdout.isatty() else 1000
    return Console(
        width=width, highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty()
    )


def help_section(
    help_text: str, title: str, rows: Sequence[tuple[str, str]], after: str = ""
) -> str:
    """A help page with one more section at its end, in the manner of those before it."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{help_text}", "", f"{title}:"]
    for name, text in rows:
        lines += textwrap.wrap(
            text,
            _HELP_WIDTH,
            initial_indent=f"  {name:{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
    return "\n".join([*lines, *(["", after] if after else [])])


def note(text: str) -> None:
    """For people who watch: never part of the answer."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal. The function that it gives takes how many
    bytes are done, and of how many."""
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:z,.2f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _is_number(text: str) -> bool:
    return text == "-" or text.removeprefix("-")[:1].isdigit()
