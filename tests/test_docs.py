"""The reference says all that there is, and nothing that is gone.

What is made from code (settings, options, metrics, messages, routes) must stand in docs/reference
row for row as written here; `python tests/test_docs.py` prints the rows. What needs words of its
own (refusals, bodies of routes) must have its row, and no other."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from fastapi.routing import APIRoute

from kvkeep.cli.bench import BENCHES
from kvkeep.cli.main import app as command_line
from kvkeep.client.hints import EXTRA_CACHED_TOKENS
from kvkeep.connector.options import KNOWN_KEYS
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.offloading import CPU_BYTES, KVTransferConfig
from kvkeep.engine.request import RequestMetrics
from kvkeep.kv.outcomes import OUTCOMES
from kvkeep.server.counters import Counters, Latency, metrics_of
from kvkeep.server.figures import FiguresShown
from kvkeep.server.http import make_app
from kvkeep.server.metrics import families
from kvkeep.server.settings import TABLE
from kvkeep.server.status import (
    PoolShown,
    QuotasShown,
    RestartShown,
    SecurityShown,
    Snapshot,
    Status,
)
from kvkeep.wire import messages

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

# Codes that are put together: what the source says -> what it can become.
COMPOSED_CODES = {"f'bad_{field}'": {"bad_salt", "bad_lora", "bad_extra"}}
# Codes that are answers of HTTP itself and not raised as RequestError.
HTTP_CODES = {"not_found", "method_not_allowed", "bad_request", "bad_setting", "internal_error"}


def table_rows(name: str) -> list[str]:
    """Rows of the tables of a reference page whose first cell is code."""
    lines = (REFERENCE / name).read_text().splitlines()
    return [line for line in lines if re.match(r"\| `", line)]


def first_cells(name: str) -> list[str]:
    return [row.split("`")[1] for row in table_rows(name)]


# -- what there is


def setting_rows() -> list[str]:
    return [
        f"| `{name}` | `{line.default}` | {'yes' if line.live else 'no'} | {line.help} |"
        for name, line in TABLE.items()
    ]


def empty_status() -> Status:
    return Status(
        *("", "", 0, "", "", "", 0.0, True, False),
        PoolShown(0, 0, 0, 0, 0, "", {}, {}),
        QuotasShown(0, 0, 0, False),
        *({}, [], 0, 0, 0, 0, [], {}, FiguresShown(), [], {}, {}, None, {}),
        dict.fromkeys(metrics_of(Counters, ""), 0),
        *({}, {}),
        RestartShown(),
        SecurityShown(tls=False, admin_token=False),
        [],
        [],
    )


def metric_rows() -> list[str]:
    empty = Snapshot(empty_status(), {}, Latency())
    suffixes = {"counter": "_total", "info": "_info"}
    rows = []
    for family in families(empty, 0.0):
        labels = getattr(family, "_labelnames", ())
        labelled = ", ".join(f"`{label}`" for label in labels)
        name = family.name + suffixes.get(family.type, "")
        rows.append(f"| `{name}` | {family.type} | {labelled} | {family.documentation} |")
    return rows


def outcome_rows() -> list[str]:
    return [f"| `{name}` | {text} |" for name, text in OUTCOMES if name != "lacked"]


def message_rows() -> list[str]:
    rows = []
    for message in (*get_args(messages.Request), *get_args(messages.Reply)):
        fields = ", ".join(f"`{field}`" for field in message.__struct_fields__)
        rows.append(
            f"| `{message.__name__}` | {fields} | {' '.join((message.__doc__ or '').split())} |"
        )
    return rows


def routes() -> list[APIRoute]:
    class Nothing:
        started, snapshot = 0.0, None

        def __getattr__(self, name: str) -> Any:
            return self

    nothing: Any = Nothing()
    return [
        route for route in make_app(nothing, nothing, nothing).routes if isinstance(route, APIRoute)
    ]


def commands(
    group: Any = None, words: tuple[str, ...] = ("kvkeep",)
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it; groups are walked."""
    group = group or typer.main.get_command(command_line)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def option_rows(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[-1] if is_option else parameter.metavar or parameter.name.upper()
        rows.append(f"| `{name}` | {parameter.help} |")
    return rows


def refusal_codes() -> set[str]:
    """The first argument of every RequestError and Refused in the source, but for what a false
    server says in chaos runs."""
    codes = set(HTTP_CODES)
    for file in {*(ROOT / "src").rglob("*.py")} - {
        *(ROOT / "src" / "kvkeep" / "testing").glob("chaos*.py")
    }:
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and node.args
                and _called(node) in ("RequestError", "Refused")
            ):
                codes |= _codes(node.args[0])
    return codes


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _codes(argument: ast.expr) -> set[str]:
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    if isinstance(argument, ast.JoinedStr):
        return COMPOSED_CODES[ast.unparse(argument)]
    return set()  # passed on from elsewhere


# -- and what is said about it


def test_tests_that_the_threat_model_names_exist() -> None:
    named = re.findall(
        r"`(\w+/test_\w+\.py)`", (ROOT / "docs" / "concepts" / "threat-model.md").read_text()
    )
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


def test_every_setting_is_documented() -> None:
    assert table_rows("settings.md") == setting_rows()


def test_every_metric_is_documented() -> None:
    assert table_rows("metrics.md") == metric_rows() + outcome_rows()


def test_every_message_is_documented() -> None:
    assert table_rows("protocol.md") == message_rows()


def test_every_refusal_is_documented() -> None:
    documented = first_cells("errors.md")
    assert len(documented) == len(set(documented))
    assert set(documented) == refusal_codes()


def test_every_route_is_documented() -> None:
    documented = first_cells("http-api.md")
    there = [f"{method} {route.path}" for route in routes() for method in sorted(route.methods)]
    assert sorted(documented) == sorted(there)


def test_every_command_and_option_is_documented() -> None:
    sections = re.split(
        r"^## `(kvkeep[^`]*)`$", (REFERENCE / "commands.md").read_text(), flags=re.MULTILINE
    )
    documented = dict(zip(sections[1::2], sections[2::2], strict=True))
    expected = {" ".join(words): option_rows(command) for words, command in commands()}
    benches = {name for name in expected if name.startswith("kvkeep bench ")}
    # All benchmarks share a section: each has --json, and the arguments of its own `run`.
    assert benches == {f"kvkeep bench {name}" for name in BENCHES}
    assert set(documented) == set(expected) - benches | {"kvkeep bench NAME"}
    for name, rows in expected.items():
        text = documented["kvkeep bench NAME" if name in benches else name]
        missing = [row for row in rows if row not in text.splitlines()]
        assert not missing, name
        if name not in benches:
            assert len(re.findall(r"^\| `", text, flags=re.MULTILINE)) == len(rows), (
                f"{name}: a row too many"
            )
    for bench in BENCHES:
        assert f"| `{bench}` | {BENCHES[bench].help} |" in documented["kvkeep bench NAME"]


def test_every_option_of_the_engine_is_documented() -> None:
    rows = [row.split(" | ")[:2] for row in table_rows("engine.md")]
    documented = {cells[0].split("`")[1]: cells[1].strip("`") for cells in rows}
    options = [
        each
        for each in fields(EngineConfig)
        if each.name not in ("sync_loads", "kv_load_failure_policy")
    ]
    assert {each.name: str(each.default) for each in options}.items() <= documented.items()
    metrics = {each.name for each in fields(RequestMetrics)} | {"ttft_ms"}
    in_params = {
        f"kvkeep_{hint}" for hint in ("priority", "ttl_ms", "session_finished", "prefetch")
    } | {*EXTRA_CACHED_TOKENS}
    in_config = {each.name for each in fields(KVTransferConfig)} | {*KNOWN_KEYS, CPU_BYTES}
    user_facing = {"kv_offloading_size", "kv_offloading_backend", "kv_transfer_config"}
    expected = {each.name for each in options} | metrics | in_params | in_config | user_facing
    assert set(documented) == expected


# -- vLLM: its connector cannot be imported here, so tables and messages are read from the source

# Which argument is the message. TokensChanged is not among them: the connector catches it, and
# nobody reads it.
ERRORS = {
    "SettingsError": 0,
    "KVKeepError": 0,
    "DeviceError": 0,
    "PoolError": 0,
    "RequestError": 1,
    "_refused": 1,
}
VARIES = "…"


def table_of(file: str, name: str) -> dict[str, str]:
    """A module's table of plain values."""
    for node in ast.parse((ROOT / "src" / "kvkeep" / file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise KeyError(name)


def vllm_metric_rows() -> list[str]:
    counters, gauges = table_of("vllm/stats.py", "COUNTERS"), table_of("vllm/stats.py", "GAUGES")
    return [
        f"| `vllm:kvkeep_{name}_total` | counter | {text} |" for name, text in counters.items()
    ] + [f"| `vllm:kvkeep_{name}` | gauge | {text} |" for name, text in gauges.items()]


def messages_in(*places: str) -> set[str]:
    """What the modules below these places say in logs, errors and refusals, with … for what
    varies."""
    said = set()
    for place in places:
        path = ROOT / "src" / "kvkeep" / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            tree = ast.parse(file.read_text())
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for function in functions:
                if function.name in ("refusal", "trouble"):  # these return their words
                    said |= {
                        text
                        for node in ast.walk(function)
                        if isinstance(node, ast.Return)
                        for text in _texts(node)
                    }
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        said |= _said_by(node, [function, tree])
    return {text for text in said if len(text.replace(VARIES, "").split()) > 1}


def _said_by(node: ast.Call, scopes: Sequence[ast.AST]) -> set[str]:
    if ast.unparse(node.func).startswith(("log.", "_log.", "self._failed")):
        at, before = 0, ""
    elif _called(node) in ERRORS:
        at, before = (
            ERRORS[_called(node)],
            f"layer {VARIES} " if _called(node) == "_refused" else "",
        )
    else:
        return set()
    argument: ast.AST | None = node.args[at] if len(node.args) > at else None
    if isinstance(argument, ast.Name):  # put together before
        argument = next(
            (
                each.value
                for scope in scopes
                for each in ast.walk(scope)
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == argument.id
            ),
            None,
        )
    text = _template(argument)
    return {before + text} if text else set()


def _texts(returned: ast.Return) -> Iterator[str]:
    value = returned.value
    yield from filter(
        None, [_template(value.elts[0] if isinstance(value, ast.Tuple) else value)]
    )  # the rest is a hint


def _template(node: ast.AST | None) -> str:
    """A message's fixed words, with … for what varies; "" for what is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sdr]", VARIES, text)
        case ast.JoinedStr(values=parts):
            return "".join(
                _template(part) if isinstance(part, ast.Constant) else VARIES for part in parts
            )
    return ""


def says(template: str) -> str:
    """A pattern for texts that say this, whatever stands for what varies."""
    return ".*".join(re.escape(part) for part in template.split(VARIES))


def messages_explained() -> list[str]:
    text = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    ours, _, theirs = text.partition("## vLLM's own words")
    assert theirs
    return [row.split("`")[1] for row in re.findall(r"^\| `.*$", ours, flags=re.MULTILINE)]


VLLM_SPEAKS = (
    *(
        "vllm",
        "client/outage.py",
        "client/shared_pool.py",
        "client/transport.py",
        "connector/options.py",
    ),
    *("client/copier.py", "gpu/driver.py", "gpu/kernels.py"),
)


def test_every_message_that_a_user_of_vllm_can_meet_is_explained() -> None:
    logged = messages_in(
        "client/worker.py",
        "client/rank_memory.py",
        "client/scheduler.py",
        "connector",
        "gpu/copier.py",
    )
    expected = messages_in(*VLLM_SPEAKS) | {text for text in logged if text.startswith("kvkeep: ")}
    assert len(expected) > 30, "the source was read"
    explained = messages_explained()
    assert [
        text
        for text in sorted(expected)
        if not any(re.search(says(text), row) for row in explained)
    ] == []


def test_every_message_that_is_explained_exists() -> None:
    known = messages_in("vllm", "client", "connector", "kv", "gpu")
    known |= messages_in(
        "server/startup.py", "server/settings.py", "tiers/memory.py", "tiers/tier_keys.py"
    )
    assert [
        row
        for row in messages_explained()
        if not any(re.fullmatch(says(text), row) for text in known)
    ] == []


def test_messages_are_read_however_they_are_put_together(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "def f(x):\n"
        "    log.warning('kvkeep: %s and %d', x, 1)\n"
        "    problem = f'no {x} here'\n"
        "    raise SettingsError(problem, 'a hint')\n"
        "def trouble(x):\n"
        "    return f'no server at {x}', 'a remedy'\n"
    )
    assert messages_in(str(file)) == {"kvkeep: … and …", "no … here", "no server at …"}
    assert re.search(says("no … here"), "kvkeep: no vLLM here, today")
    assert not re.fullmatch(says("no … here"), "no vLLM there")


def test_every_key_and_metric_of_the_vllm_connector_is_documented() -> None:
    rows = table_rows("vllm.md")
    cells = first_cells("vllm.md")
    assert [row for row in rows if row.startswith("| `vllm:")] == vllm_metric_rows()
    keys = {
        cell for cell in cells if cell.startswith(("kvkeep.", "lmcache.")) and cell != "kvkeep.vllm"
    }
    assert keys == {*KNOWN_KEYS, "lmcache.mp.host", "lmcache.mp.port"}
    hints = {f"kvkeep_{hint}" for hint in ("priority", "ttl_ms", "session_finished", "prefetch")}
    assert {*EXTRA_CACHED_TOKENS} | hints <= set(cells)
    memory, disk = (table_of("vllm/events.py", name) for name in ("MEDIUM", "DISK_MEDIUM"))
    text = " ".join((REFERENCE / "vllm.md").read_text().split())
    assert f"`medium` is `{memory}` while they are in memory and `{disk}` while a disk" in text


# -- links and samples in all documents


def code_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, fenced or indented."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_samples_exist(document: Path) -> None:
    known = {words[1:]: command for words, command in commands()}
    for line in code_lines(document.read_text()):
        match = re.match(r"(?:\$ )?(?:.*\| )?kvkeep (?!is )(.*)", line)
        if not match or not re.match(
            r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:printf .*\| |echo .*\| )?kvkeep ", line
        ):
            continue
        words = shlex.split(match[1], comments=True)
        if words[:1] in (["--version"], ["--help"]):
            continue
        path = next((tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in known), None)
        assert path is not None, f"{line}: no such command"
        unknown = [
            word
            for word in words[len(path) :]
            if word.startswith("--") and not has_option(path, word, known)
        ]
        assert not unknown, f"{line}: {unknown}"


def has_option(path: tuple[str, ...], word: str, known: dict[tuple[str, ...], Any]) -> bool:
    flag = word.partition("=")[0]
    if flag == "--help" or any(
        flag in (*parameter.opts, *parameter.secondary_opts) for parameter in known[path].params
    ):
        return True
    name = flag.removeprefix("--").replace("-", "_")
    if path in (("serve",), ("doctor",)):
        return name in TABLE or name.removeprefix("no_") in TABLE
    return path[0] == "bench" and name in inspect.signature(_bench(path[1]).run).parameters


def _bench(name: str) -> Any:
    from kvkeep.cli.bench import BENCHES

    return importlib.import_module(BENCHES[name].module)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target} leads nowhere"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{target}: no such heading"


def test_files_that_documents_name_exist() -> None:
    """The log may name files that are gone."""
    roots = [ROOT / each for each in ("", "src", "src/kvkeep", "lab/kvkeep_lab", "tests")]
    named = {
        (document.name, name)
        for document in DOCUMENTS
        if document.name != "LOG.md"
        for name in re.findall(r"`([\w.-]+/[\w/.-]+\.(?:py|c|md))[:`]", document.read_text())
    }
    assert len(named) > 100, "the pages were read"
    missing = [
        (document, name)
        for document, name in sorted(named)
        if not any((root / name).is_file() for root in roots)
    ]
    assert missing == []


def names_in(tree: ast.Module) -> set[str]:
    """Functions, classes and methods of a module, methods as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = set()
    for node in tree.body:
        if isinstance(node, kinds):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


def missing_steps(text: str) -> list[str]:
    """Those of the steps written as `file.py:name` that the source does not have."""
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", text)
    missing = []
    for path, name in steps:
        file = ROOT / "src" / "kvkeep" / path
        if not file.is_file() or name not in names_in(ast.parse(file.read_text())):
            missing.append(f"{path}:{name}")
    return missing


def test_every_function_that_the_journeys_name_exists() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", text)) > 40, "the page was read"
    assert missing_steps(text) == []


def test_a_step_that_is_gone_is_found() -> None:
    good = "`store/store.py:Store.lookup` and `units.py:format_size`"
    bad = "`store/store.py:Store.fly`, `store/gone.py:Store` and `store/store.py:lookup`"
    assert missing_steps(good) == []
    assert len(missing_steps(bad)) == 3


def anchors(text: str) -> set[str]:
    """Headings as the usual Markdown viewers name them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_samples_of_a_command_that_is_gone_are_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    for bad in (
        "    kvkeep fly",
        "```\n$ kvkeep status --nothing\n```",
        "    kvkeep serve --pool-sise 1GiB",
    ):
        document.write_text(bad)
        with pytest.raises(AssertionError):
            test_commands_in_samples_exist(document)


if __name__ == "__main__":
    for rows in (setting_rows(), metric_rows(), outcome_rows(), message_rows()):
        print("\n".join(rows), end="\n\n")
    for words, command in commands():
        print(" ".join(words), *option_rows(command), sep="\n")
