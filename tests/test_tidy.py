"""Keeps the house in order without anyone remembering to: each rule is a function from files to
complaints.

A rule is tested twice: on the repository, which must give no complaint, and on a bad sample, which
must give one. The reasons for the tree and its import order are in
docs/decisions/0001-tree-and-import-order.md."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAX_FUNCTION_LINES = 75
MIN_LINES_TO_TEST = 70

# Each folder may import itself and those before it.
ORDER = [
    "kv",
    "wire",
    "gpu",
    "client",
    "store",
    "tiers",
    "server",
    "connector",
    "engine",
    "vllm",
    "testing",
    "bench",
    "cli",
]
LAB_FOLDERS = {f"lab/{name}" for name in ("simulation", "chaos", "fuzz", "bench", "commands")}
SHARED = {"kvkeep.errors", "kvkeep.units"}  # top-level modules that anyone may import
ENGINE_SIDE = {
    "kv",
    "wire",
    "client",
    "connector",
}  # what an engine loads: no dependency that engines do not ship already
ENGINE_SHIPS = {"msgspec", "numpy", "torch"}
# Modules that need an extra, and are imported where it is switched on: nowhere at module level.
EXTRAS_OF_ENGINES = {"kvkeep.wire.tracing": "opentelemetry"}
TORCH_FOLDERS = {"gpu", "engine", "vllm"}
# Clocks, files, processes, sockets: what the store may not reach.
OUTSIDE_WORLD = {
    "asyncio",
    "datetime",
    "fcntl",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "select",
    "shutil",
}
OUTSIDE_WORLD |= {"signal", "socket", "subprocess", "tempfile", "threading", "time", "ssl"}
VAGUE_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "misc"}
FOREIGN_WORDS = {"chunk", "chunks", "page", "pages"}  # the word is block
FOREIGN_WORDS_ALLOWED = {
    "OS_PAGE_BYTES",
    "os_page_bytes",
    "dashboard_page",
    "huge_pages",
}  # a page that is no block
MACHINE_ROOTS = ["home", "root", "Users", "work", "workspace", "mnt"]

# Modules that nothing in src imports, and modules without a test file of their own: each with its
# reason.
LIVE_WITHOUT_IMPORT: dict[str, str] = {
    "kvkeep.tiers.file_tier": "opened by its address, as all shared tiers are",
    "kvkeep.tiers.disk_tier": "a disk for callers that may wait, which the server may not",
    "kvkeep.tiers.s3": "imported by name, where its extra is installed",
    "kvkeep.tiers.mooncake": "imported by name, where its extra is installed",
    "kvkeep.tiers.valkey": "imported by name, where its extra is installed",
}
TESTED_ELSEWHERE: dict[str, str] = {
    "kvkeep.kv.native": "tests of checksum and copy run it in each instruction set",
    "kvkeep.store.plans": "plain data",
    "kvkeep.cli.demo_engine": "tests of the demo run it",
    "kvkeep.cli.doctor_host": "tests of the doctor plant the faults that it finds",
    "kvkeep.cli.doctor_server": "tests of the doctor plant the faults that it finds",
    "kvkeep.server.disk": "tests of movement run it in a real server",
    "kvkeep.server.shared": "tests of shared tiers run it in real servers",
    "kvkeep.server.lower_tier": "tests of movement run it in a real server",
    "kvkeep.server.write_behind": "tests of movement run it in a real server",
    "kvkeep.engine.models.gqa": "tests of the decoder run both families of models",
    "kvkeep.engine.models.mla": "tests of the decoder run both families of models",
    "kvkeep_lab.simulation.store_model": "the store machine holds the store to it, step by step",
}
ELSEWHERE = {"vllm", "zmq"}  # vLLM has an environment of its own, and brings zmq
TESTS_OF_THE_WHOLE = {
    "tests/test_tidy.py",
    "tests/test_ci.py",
    "tests/test_docs.py",
    "tests/test_package.py",
    "tests/test_getting_started.py",
}


# --- what the rules look at -----------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree: most rules look at them."""
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    @property
    def in_src(self) -> bool:
        return self.path.startswith("src/kvkeep/")

    @property
    def in_lab(self) -> bool:
        return self.path.startswith("lab/kvkeep_lab/")

    @property
    def is_test(self) -> bool:
        return not self.in_src and not self.in_lab

    @property
    def folder(self) -> str:
        """The folder below the package or the tests, after "lab/" for those of the lab; empty for
        top-level files."""
        is_of_lab = self.in_lab or self.path.startswith("tests/lab/")
        parts = PurePosixPath(self.path).parts[1 if self.is_test and not is_of_lab else 2 : -1]
        return "/".join([*["lab"] * is_of_lab, *parts[:1]])

    @property
    def module(self) -> str:
        parts = PurePosixPath(self.path).with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def says(self, line: int, complaint: str) -> str:
        return f"{self.path}:{line}: {complaint}"


@dataclass(frozen=True)
class Import:
    """`module` as it would be looked up; for `from a import b` both a and a.b are candidates."""

    candidates: tuple[str, ...]
    line: int
    lazy: bool  # inside a function, or for type checkers only

    @property
    def top(self) -> str:
        return self.candidates[0].partition(".")[0]


@cache
def imports(source: Source) -> list[Import]:
    return list(_imports(source, source.tree, lazy=False))


def _imports(source: Source, parent: ast.AST, lazy: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import):
            yield from (Import((alias.name,), node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = _absolute(source, node)
            for alias in node.names:
                yield Import((package, f"{package}.{alias.name}"), node.lineno, lazy)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from _imports(source, node, lazy or function or typing_only)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".")
    keep = len(package) - node.level + (source.stem == "__init__")
    return ".".join([*package[:keep], *filter(None, [node.module])])


@cache
def repository() -> tuple[Source, ...]:
    files = [file for folder in ("src", "lab", "tests") for file in ROOT.glob(f"{folder}/**/*.py")]
    return tuple(
        Source(file.relative_to(ROOT).as_posix(), file.read_text()) for file in sorted(files)
    )


# --- rules about one file -------------------------------------------------------------------------


def function_length(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield source.says(
                    node.lineno, f"{node.name} has {length} lines, {MAX_FUNCTION_LINES} at most"
                )


def import_direction(source: Source) -> Iterator[str]:
    if not source.in_src:
        return
    if source.folder and source.folder not in ORDER:
        yield source.says(1, f"folder {source.folder} has no place in the import order")
        return
    for entry in imports(source):
        if entry.top == "kvkeep_lab":
            yield source.says(entry.line, "what is shipped may not import the lab")
        if entry.top == "kvkeep" and not _may_import(source, entry):
            yield source.says(entry.line, f"{source.module} may not import {entry.candidates[-1]}")


def _may_import(source: Source, entry: Import) -> bool:
    if SHARED.intersection(entry.candidates):
        return True
    if source.module in SHARED:
        return False
    # The package itself is the client's public face, and __main__ the command line's.
    own = source.folder or {"__init__": "client", "__main__": "cli"}.get(source.stem, "")
    folders = [name.split(".")[1] for name in entry.candidates if "." in name]
    target = next((folder for folder in folders if folder in ORDER), "client")
    if own not in ORDER or (own == "store" and target in ("wire", "client")):
        return False
    return ORDER.index(target) <= ORDER.index(own)


def store_is_pure(source: Source) -> Iterator[str]:
    if not source.in_src or source.folder != "store":
        return
    for entry in imports(source):
        if entry.top in OUTSIDE_WORLD:
            yield source.says(
                entry.line, f"the store decides without I/O and clock, but imports {entry.top}"
            )
    for node in source.nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("open", "input")
        ):
            yield source.says(
                node.lineno, f"the store decides without I/O, but calls {node.func.id}()"
            )


def engine_side_dependencies(source: Source) -> Iterator[str]:
    if not source.in_src or not (
        source.folder in ENGINE_SIDE or source.module in SHARED | {"kvkeep"}
    ):
        return
    extra = EXTRAS_OF_ENGINES.get(source.module, "")
    for entry in imports(source):
        known = {*ENGINE_SHIPS, "kvkeep", extra, *sys.stdlib_module_names}
        if entry.top not in known:
            yield source.says(entry.line, f"{entry.top} would be a new dependency of the engine")


def extras_are_lazy(source: Source) -> Iterator[str]:
    if source.is_test:
        return
    for entry in imports(source):
        if not entry.lazy and EXTRAS_OF_ENGINES.keys() & set(entry.candidates):
            yield source.says(entry.line, f"{entry.candidates[-1]} at module level needs an extra")


def torch_is_lazy(source: Source) -> Iterator[str]:
    if not source.in_src or source.folder in TORCH_FOLDERS:
        return
    for entry in imports(source):
        if entry.top == "torch" and not entry.lazy:
            yield source.says(
                entry.line, "torch at module level outside " + ", ".join(sorted(TORCH_FOLDERS))
            )


def vague_names(source: Source) -> Iterator[str]:
    for part in PurePosixPath(source.path).with_suffix("").parts:
        if part.removeprefix("test_").strip("_") in VAGUE_NAMES:
            yield source.says(1, f'"{part}" says nothing: name the one idea')
        if re.search(r"_v\d+$", part):
            yield source.says(1, f'"{part}": replace the first version, then delete it')


def no_print(source: Source) -> Iterator[str]:
    if not source.in_src or source.folder in ("cli", "bench"):
        return
    for node in source.nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            yield source.says(node.lineno, "print() outside the command line")


def owned_todos(source: Source) -> Iterator[str]:
    if not re.search(r"TODO|FIXME|XXX", source.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and re.search(
            r"\b(TODO|FIXME|XXX)\b(?!\([\w-]+\): \S)", token.string
        ):
            yield source.says(
                token.start[0], "a TODO needs an owner and a reason: TODO(owner): reason"
            )


def guarded_excepts(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = (
            {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            if node.type
            else {"Exception"}
        )
        lines = "\n".join(source.lines[node.lineno - 1 : node.body[0].lineno - 1])
        if caught & {"Exception", "BaseException"} and not re.search(r"# guard: \S+", lines):
            yield source.says(
                node.lineno, "a blanket except needs a `# guard:` comment that says why"
            )


def one_vocabulary(source: Source) -> Iterator[str]:
    for name, line in [(source.stem, 1), *_defined_names(source)]:
        words = (
            re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().split("_")
        )
        if FOREIGN_WORDS.intersection(words) and name not in FOREIGN_WORDS_ALLOWED:
            yield source.says(line, f"{name}: the word is block")


def _defined_names(source: Source) -> Iterator[tuple[str, int]]:
    """Names this file gives; those it merely uses are somebody else's choice."""
    for node in source.nodes:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node.lineno
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                yield name, node.lineno


def no_machine_paths(source: Source) -> Iterator[str]:
    outside = re.escape("../" + "shared")
    pattern = re.compile(rf"{outside}|(?<![\w.~*}}])/(?:{'|'.join(MACHINE_ROOTS)})\b(?!\.)")
    for number, line in enumerate(source.lines, start=1):
        if found := pattern.search(line):
            yield source.says(number, f"{found[0]} exists on one machine only")


# --- rules about all files together ---------------------------------------------------------------


def dead_modules(sources: Sequence[Source], entry_points: set[str]) -> Iterator[str]:
    """Each module is imported by another, or named in a string of it (`module` or `module:name`), or
    is an entry point. For
    `testing` and the lab, to be imported by a test is enough."""
    used: set[str] = set()
    used_by_tests: set[str] = set()
    for source in sources:
        names = {name for entry in imports(source) for name in entry.candidates} - {source.module}
        names |= {
            node.value.partition(":")[0]
            for node in source.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        (used_by_tests if source.is_test else used).update(names)
    for source in sources:
        if source.is_test or source.stem in ("__init__", "__main__"):
            continue
        tested_product = (
            source.in_lab or source.folder == "testing"
        ) and source.module in used_by_tests
        if (
            source.module not in used | entry_points | set(LIVE_WITHOUT_IMPORT)
            and not tested_product
        ):
            yield source.says(1, f"nothing imports {source.module}")


def mirrored_tests(sources: Sequence[Source]) -> Iterator[str]:
    """tests/<folder>/test_x.py, or test_x_<aspect>.py, tests src/kvkeep/<folder>/x.py, or for a
    folder of the lab lab/kvkeep_lab/<folder>/x.py; each longer x.py has one. Those of traps
    (docs/concepts/traps.md) test the whole."""
    modules = {(source.folder, source.stem) for source in sources if not source.is_test}
    tested: set[tuple[str, str]] = set()
    for source in sources:
        if (
            not source.is_test
            or not source.stem.startswith("test_")
            or source.folder not in {"", *ORDER, *LAB_FOLDERS}
        ):
            continue
        words = source.stem.split("_")[1:]
        stems = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
        # A module with a leading underscore is tested under its plain name.
        known = [(source.folder, name) for stem in stems for name in (stem, f"_{stem}")]
        mirrored = next((module for module in known if module in modules), None)
        if mirrored is not None:
            tested.add(mirrored)
        elif source.path not in TESTS_OF_THE_WHOLE and not source.stem.startswith("test_trap_"):
            yield source.says(1, f"tests no module: there is no {source.folder}/{stems[0]}.py")
    for source in sources:
        long = (
            not source.is_test
            and len(source.lines) > MIN_LINES_TO_TEST
            and source.stem != "__init__"
        )
        if (
            long
            and (source.folder, source.stem) not in tested
            and source.module not in TESTED_ELSEWHERE
        ):
            yield source.says(
                1, f"{len(source.lines)} lines and no tests/{source.folder}/test_{source.stem}.py"
            )


def lost_imports(sources: Sequence[Source]) -> Iterator[str]:
    """What a test imports is there: of some tests that would be told only where vLLM is
    installed."""
    modules = {source.module for source in sources if not source.is_test}
    packages = {module.rpartition(".")[0] for module in modules} | {"kvkeep", "kvkeep_lab"}
    beside = {source.stem for source in sources if source.is_test}
    for source in sources:
        for entry in imports(source) if source.is_test else []:
            module = entry.candidates[0]
            if entry.top in ("kvkeep", "kvkeep_lab"):
                found = module in modules | packages
            else:
                found = (
                    entry.top in ELSEWHERE | beside
                    or importlib.util.find_spec(entry.top) is not None
                )
            if not found and not entry.lazy:
                yield source.says(entry.line, f"there is no {module}")


def folder_maps(sources: Sequence[Source]) -> Iterator[str]:
    """The docstring of a folder's `__init__.py` names every file of the folder, and no other."""
    for source in sources:
        if source.is_test or source.stem != "__init__" or not source.folder:
            continue
        folder = PurePosixPath(source.path).parent
        files = {
            PurePosixPath(each.path).name
            for each in sources
            if PurePosixPath(each.path).parent == folder and each is not source
        }
        named = set(re.findall(r"\b\w+\.py\b", ast.get_docstring(source.tree) or ""))
        for name in sorted(named - files):
            yield source.says(1, f"the map of the folder names {name}, which is not there")
        for name in sorted(files - named):
            yield source.says(1, f"the map of the folder does not name {name}")


def import_circles(sources: Sequence[Source]) -> Iterator[str]:
    """No module imports itself by way of others. An import inside a function or for type checkers
    counts."""
    modules = {source.module: source for source in sources if not source.is_test}
    imported: dict[str, set[str]] = {module: set() for module in modules}
    for module, source in modules.items():
        for entry in imports(source):
            found = [name for name in entry.candidates if name in modules]
            imported[module].update(found[-1:])  # of `from a import b` a.b, if that is a module
        imported[module].discard(module)
    while True:
        try:
            TopologicalSorter(imported).prepare()
            return
        except CycleError as error:
            circle: list[str] = error.args[1][
                ::-1
            ]  # each imports the next; the first is also the last
            yield modules[circle[0]].says(1, f"an import circle: {' -> '.join(circle)}")
            imported[circle[0]].remove(circle[1])  # shows other circles, if any


def script_entry_points(pyproject: str) -> set[str]:
    project = tomllib.loads(pyproject).get("project", {})
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return {target.partition(":")[0] for group in groups for target in group.values()}


# --- the repository -------------------------------------------------------------------------------

Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [
    function_length,
    import_direction,
    store_is_pure,
    engine_side_dependencies,
    extras_are_lazy,
    torch_is_lazy,
    vague_names,
    no_print,
    owned_todos,
    guarded_excepts,
    one_vocabulary,
    no_machine_paths,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule) -> None:
    assert [complaint for source in repository() for complaint in rule(source)] == []


def test_no_module_is_dead() -> None:
    entry_points = {
        name
        for folder in (ROOT, ROOT / "lab")
        for name in script_entry_points((folder / "pyproject.toml").read_text())
    }
    assert list(dead_modules(repository(), entry_points)) == []


def test_tests_mirror_the_source() -> None:
    assert list(mirrored_tests(repository())) == []


def test_imports_of_tests_are_there() -> None:
    assert list(lost_imports(repository())) == []


def test_every_folder_map_names_the_files_of_its_folder() -> None:
    assert list(folder_maps(repository())) == []


def test_no_imports_form_a_circle() -> None:
    assert list(import_circles(repository())) == []


def test_documents_and_build_files_name_no_machine_path() -> None:
    patterns = [
        "*.md",
        "docs/**/*.md",
        "Makefile",
        "*.toml",
        "setup.py",
        ".ci/*",
        "src/**/*.c",
        "examples/**/*",
    ]
    files = [file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()]
    sources = [Source(file.relative_to(ROOT).as_posix(), file.read_text()) for file in files]
    assert [complaint for source in sources for complaint in no_machine_paths(source)] == []


def test_exceptions_to_the_rules_are_still_needed() -> None:
    modules = {source.module for source in repository() if not source.is_test}
    assert set(LIVE_WITHOUT_IMPORT) | set(TESTED_ELSEWHERE) <= modules


# --- the rules can fail ---------------------------------------------------------------------------


def lines_of_code(count: int) -> str:
    return "\n".join(["x = 1"] * count)


BAD: list[tuple[Rule, str, str]] = [
    (function_length, "src/kvkeep/kv/a.py", "async def f():\n" + "    x = 1\n" * 75),
    (import_direction, "src/kvkeep/kv/a.py", "from kvkeep.wire import messages"),
    (import_direction, "src/kvkeep/kv/a.py", "def f():\n    import kvkeep.cli.main"),
    (import_direction, "src/kvkeep/kv/a.py", "from kvkeep import client"),
    (import_direction, "src/kvkeep/kv/a.py", "import kvkeep"),
    (import_direction, "src/kvkeep/kv/a.py", "from ..wire import messages"),
    (import_direction, "src/kvkeep/kv/__init__.py", "from ..store.index import Index"),
    (import_direction, "src/kvkeep/store/a.py", "from kvkeep.wire.messages import Lookup"),
    (import_direction, "src/kvkeep/store/a.py", "from kvkeep import connect"),
    (import_direction, "src/kvkeep/units.py", "import kvkeep.kv.keys"),
    (import_direction, "src/kvkeep/__init__.py", "from kvkeep.server.daemon import Daemon"),
    (import_direction, "src/kvkeep/plugins/a.py", ""),
    (import_direction, "src/kvkeep/cli/a.py", "from kvkeep_lab.chaos import run"),
    (store_is_pure, "src/kvkeep/store/a.py", "from time import monotonic"),
    (store_is_pure, "src/kvkeep/store/a.py", "def f():\n    import os.path"),
    (store_is_pure, "src/kvkeep/store/a.py", "text = open('a').read()"),
    (engine_side_dependencies, "src/kvkeep/client/a.py", "def f():\n    import prometheus_client"),
    (engine_side_dependencies, "src/kvkeep/wire/a.py", "from fastapi import FastAPI"),
    (engine_side_dependencies, "src/kvkeep/__init__.py", "import rich.console"),
    (
        torch_is_lazy,
        "src/kvkeep/client/a.py",
        "try:\n    from torch import Tensor\nexcept ImportError:\n    pass",
    ),
    (extras_are_lazy, "src/kvkeep/server/a.py", "from kvkeep.wire.tracing import Tracing"),
    (vague_names, "src/kvkeep/kv/utils.py", ""),
    (vague_names, "src/kvkeep/common/a.py", ""),
    (vague_names, "src/kvkeep/kv/keys_v2.py", ""),
    (no_print, "src/kvkeep/server/a.py", "print('here')"),
    (owned_todos, "src/kvkeep/kv/a.py", "x = 1  # TODO later"),
    (owned_todos, "src/kvkeep/kv/a.py", "# FIXME(): no owner"),
    (guarded_excepts, "src/kvkeep/kv/a.py", "try:\n    f()\nexcept:\n    pass"),
    (
        guarded_excepts,
        "src/kvkeep/kv/a.py",
        "try:\n    f()\nexcept (OSError, Exception):  # guard:\n    pass",
    ),
    (one_vocabulary, "src/kvkeep/kv/a.py", "chunk_size = 1"),
    (one_vocabulary, "src/kvkeep/kv/a.py", "class KVPage: ..."),
    (one_vocabulary, "src/kvkeep/kv/a.py", "def f(pages): ..."),
    (one_vocabulary, "src/kvkeep/kv/a.py", "self.last_chunk = 1"),
    (no_machine_paths, "src/kvkeep/kv/a.py", 'x = "/' + 'home/someone/x"'),
    (no_machine_paths, "docs/a.py", "see ../" + "shared/notes.md"),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"), BAD, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_bad_sample_is_found(rule: Rule, path: str, text: str) -> None:
    complaints = list(rule(Source(path, text)))
    assert complaints
    assert all(complaint.startswith(f"{path}:") for complaint in complaints)


GOOD: list[tuple[str, str]] = [
    (
        "src/kvkeep/kv/a.py",
        "from kvkeep import errors\nfrom kvkeep.units import MIB\nfrom . import keys",
    ),
    ("src/kvkeep/__init__.py", "from kvkeep.client.connection import connect"),
    (
        "src/kvkeep/server/a.py",
        "from kvkeep import __version__\nimport fastapi\nfrom ..store import index",
    ),
    ("src/kvkeep/store/a.py", "from kvkeep.kv.keys import BlockKey\nimport numpy, heapq"),
    ("src/kvkeep/client/a.py", "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"),
    ("src/kvkeep/cli/a.py", "print('hello')"),
    ("src/kvkeep/kv/a.py", "x = 'TODO'  # TODO(kv): until hashes are stable upstream"),
    (
        "src/kvkeep/kv/a.py",
        "try:\n    f()\nexcept Exception:  # guard: the engine serves on\n    pass",
    ),
    (
        "src/kvkeep/kv/a.py",
        "size = mmap.PAGESIZE\nchunked_prefill = True\nx = text.page\npath = '/dev/shm'",
    ),
    ("src/kvkeep/kv/a.py", "def f():\n" + "    x = 1\n" * 69),
]


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_a_good_sample_passes_every_rule(path: str, text: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(Source(path, text))] == []


def test_dead_modules_are_found() -> None:
    used = Source("src/kvkeep/kv/used.py", "")
    user = Source("src/kvkeep/cli/main.py", "from kvkeep.kv import used")
    dead = Source("src/kvkeep/kv/dead.py", "import kvkeep.kv.dead")
    clock = Source("src/kvkeep/testing/clock.py", "")
    test = Source(
        "tests/kv/test_dead.py", "import kvkeep.kv.dead\nfrom kvkeep.testing.clock import Clock"
    )
    scripts = script_entry_points('[project.scripts]\nkvkeep = "kvkeep.cli.main:main"')
    assert list(dead_modules([used, user, dead, clock, test], scripts)) == [
        "src/kvkeep/kv/dead.py:1: nothing imports kvkeep.kv.dead"
    ]
    assert len(list(dead_modules([used, user, dead, clock], set()))) == 3


def test_missing_and_stray_tests_are_found() -> None:
    long = Source("src/kvkeep/kv/long.py", lines_of_code(71))
    other = Source("src/kvkeep/kv/other.py", lines_of_code(71))
    short = Source("src/kvkeep/kv/short.py", lines_of_code(70))
    aspect = Source("tests/kv/test_other_under_load.py", "")
    stray = Source("tests/kv/test_stray.py", "")
    chaos = Source("tests/chaos/test_anything.py", "")
    assert list(mirrored_tests([long, other, short, aspect, stray, chaos])) == [
        "tests/kv/test_stray.py:1: tests no module: there is no kv/stray.py",
        "src/kvkeep/kv/long.py:1: 71 lines and no tests/kv/test_long.py",
    ]


def test_imports_that_are_nowhere_are_found() -> None:
    used = Source("src/kvkeep/kv/used.py", "")
    beside = Source(
        "tests/vllm/replicas.py",
        "import os, numpy, vllm.v1\nfrom kvkeep.kv import used\nimport kvkeep",
    )
    test = Source(
        "tests/vllm/test_a.py",
        "from replicas import A\nfrom wires import B\nfrom kvkeep.kv.gone import C",
    )
    assert list(lost_imports([used, beside, test])) == [
        "tests/vllm/test_a.py:2: there is no wires",
        "tests/vllm/test_a.py:3: there is no kvkeep.kv.gone",
    ]


def test_folder_maps_that_are_not_true_are_found() -> None:
    complete = [
        Source("src/kvkeep/kv/__init__.py", '"""Blocks.\n\nkeys.py  keys\n"""'),
        Source("src/kvkeep/kv/keys.py", ""),
    ]
    not_true = [
        Source("lab/kvkeep_lab/fuzz/__init__.py", '"""Fuzzers: wire.py, gone.py."""'),
        Source("lab/kvkeep_lab/fuzz/wire.py", ""),
        Source("lab/kvkeep_lab/fuzz/new.py", ""),
        Source("src/kvkeep/engine/models/__init__.py", ""),
        Source("src/kvkeep/engine/models/gqa.py", ""),
    ]
    assert list(folder_maps([*complete, *not_true])) == [
        "lab/kvkeep_lab/fuzz/__init__.py:1: the map of the folder names gone.py, which is not there",
        "lab/kvkeep_lab/fuzz/__init__.py:1: the map of the folder does not name new.py",
        "src/kvkeep/engine/models/__init__.py:1: the map of the folder does not name gqa.py",
    ]


def test_import_circles_are_found() -> None:
    pair = [
        Source("src/kvkeep/kv/a.py", "from kvkeep.kv import b, lone"),
        Source("src/kvkeep/kv/b.py", "def f():\n    from kvkeep.kv.a import A"),
    ]
    three = [
        Source("lab/kvkeep_lab/x.py", "import kvkeep_lab.y"),
        Source("lab/kvkeep_lab/y.py", "from . import z"),
        Source("lab/kvkeep_lab/z.py", "if TYPE_CHECKING:\n    from kvkeep_lab.x import X"),
    ]
    lone = Source("src/kvkeep/kv/lone.py", "import kvkeep.kv.lone, os")
    test = Source("tests/kv/test_lone.py", "import kvkeep.kv.lone")
    found = [
        complaint.partition(": an import circle: ")[2]
        for complaint in import_circles([*pair, *three, lone, test])
    ]
    assert [sorted(set(circle.split(" -> "))) for circle in found] == [
        ["kvkeep.kv.a", "kvkeep.kv.b"],
        ["kvkeep_lab.x", "kvkeep_lab.y", "kvkeep_lab.z"],
    ]
    assert list(import_circles([pair[0], *three[:2], lone, test])) == []
