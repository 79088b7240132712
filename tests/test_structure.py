"""The rooms of the package and the one direction in which they may know each other (DEVELOPING.md)."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.short

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "remat_opt"
LONGEST_FILE, LONGEST_CLASS, LONGEST_FUNCTION = 400, 300, 60  # lines, docstrings included

# What each room may import of the package, in the direction in which data goes. The files at the top may know every
# room.
MAY_IMPORT = {
    "trace": {"trace"},
    "rewrites": {"rewrites", "trace"},
    "graph": {"graph"},
    "search": {"search", "graph"},
    "loops": {"loops", "graph", "rewrites", "trace"},
    "emit": {"emit", "graph", "rewrites", "trace"},
    "targets": {"targets", "trace"},
    "planner": {"planner", "targets", "emit", "loops", "search", "graph", "rewrites", "trace", "units", "version"},
    "report": {"report", "planner", "targets", "emit", "loops", "search", "graph", "rewrites", "trace", "units"},
    "callable": {"callable", "report", "planner", "targets", "search", "graph", "emit", "rewrites", "trace", "units"},
    "examples": {"examples", "api", "callable", "report", "planner", "targets", "trace", "units", "version"},
}
# The bridge from jaxprs to graphs is the one file that knows both.
MAY_ALSO_IMPORT = {"graph.build": {"trace", "rewrites"}}

WITHOUT_JAX = ("graph", "search")
BRIDGE = "graph.build"
VERSIONS = "trace.compat"
WITH_FLAX = ("linen", "nnx", "examples")


class Import(NamedTuple):
    """`module`, below remat_opt, imports `target`, a full dotted name."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"remat_opt.{self.module}, line {self.line}: {self.target}"


def is_in(name: str, *places: str) -> bool:
    """Whether a dotted name is one of the places or inside one."""
    return any(name == place or name.startswith(place + ".") for place in places)


def name_of(file: Path) -> str:
    """`remat_opt/graph/build.py` → `graph.build`; a package's `__init__.py` has the name of the package."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return is_in(name, "remat_opt") and (path.is_dir() or path.with_suffix(".py").exists())


def imports_of(file: Path) -> Iterator[Import]:
    """Every import of a file, inside functions and `if TYPE_CHECKING` too, relative ones resolved."""
    module = name_of(file)
    package = ["remat_opt", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                # `from remat_opt.graph import build` means the module, `from remat_opt.graph.graph import Graph` does
                # not. Elsewhere, as in `from jax import _src`, the longer name says more.
                inner = f"{source}.{alias.name}"
                short = is_in(source, "remat_opt") and not is_module(inner)
                yield Import(module, source if short else inner, node.lineno)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(one for file in sorted(PACKAGE.rglob("*.py")) for one in imports_of(file))


def test_the_rooms_of_the_table_are_the_rooms_of_the_package() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert rooms == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_before_it(room: str) -> None:
    inside = [one for one in all_imports() if is_in(one.module, room) and is_in(one.target, "remat_opt")]
    wrong = [
        one
        for one in inside
        if not is_in(one.target.removeprefix("remat_opt."), *MAY_IMPORT[room], *MAY_ALSO_IMPORT.get(one.module, ()))
    ]
    assert not wrong, f"expected {room}/ to import only {sorted(MAY_IMPORT[room])}:\n" + "\n".join(map(str, wrong))


def cycle_among(imports: Iterable[Import]) -> list[str]:
    """Modules each of which imports the next, and the last the first; none where imports go one way."""
    targets: dict[str, set[str]] = {}
    for one in imports:
        if is_in(one.target, "remat_opt"):
            targets.setdefault(one.module, set()).add(one.target.removeprefix("remat_opt").removeprefix("."))
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module not in done:
            for target in sorted(targets.get(module, ())):
                if found := search(target, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(targets) if (found := search(module, []))), [])


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if room != "examples"])
def test_the_page_of_a_room_names_each_of_its_files(room: str) -> None:
    page = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    files = {file.name for file in (PACKAGE / room).glob("*.py")} - {"__init__.py"}
    assert not [name for name in sorted(files) if f"`{name}`" not in page]


def test_no_modules_import_each_other() -> None:
    cycle = cycle_among(all_imports())
    assert not cycle, "expected imports to go one way, in functions and for types too: " + " → ".join(cycle)


def test_cycles_are_found() -> None:
    a, b, c = (Import(f"room.{at}", f"remat_opt.room.{to}", 1) for at, to in ("ab", "bc", "ca"))
    assert cycle_among([a, b]) == []
    assert cycle_among([a, b, c]) == ["room.a", "room.b", "room.c"]


def importers(*targets: str) -> set[str]:
    return {one.module for one in all_imports() if is_in(one.target, *targets)}


def test_graph_and_search_see_no_jax_but_through_the_bridge() -> None:
    assert {module for module in importers("jax", "jaxlib", "flax", "optax") if is_in(module, *WITHOUT_JAX)} == {BRIDGE}


def test_optional_packages_are_imported_only_where_they_are_meant() -> None:
    assert {module for module in importers("flax") if not is_in(module, *WITH_FLAX)} == set()
    assert importers("matplotlib") == {"report.pictures"}


def test_only_compat_reaches_into_private_jax() -> None:
    assert importers("jax._src") == {VERSIONS}
    reached = {
        name_of(file)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "_src"
    }
    assert reached == set(), f"expected no jax._src by attribute: move it to {VERSIONS}"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_no_file_class_or_function_is_too_long(file: Path) -> None:
    text = file.read_text()
    lengths = [(file.name, len(text.splitlines()), LONGEST_FILE)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            most = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
            lengths.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1, most))
    long = [f"{name} has {lines} lines, more than {most}" for name, lines, most in lengths if lines > most]
    assert not long, f"what is {file.name} hiding? " + "; ".join(long)


IMPORT_ALONE = """
import os, sys
import jax
from jax._src import xla_bridge

environment, configuration = dict(os.environ), dict(jax.config.values)
loaded_by_jax = set(sys.modules)
import remat_opt

assert remat_opt.__file__, "expected remat_opt/__init__.py"
assert dict(os.environ) == environment, "importing remat_opt changed the environment"
assert dict(jax.config.values) == configuration, "importing remat_opt changed jax.config"
# jax.distributed.initialize and the platform's choice have to come before the first device is touched.
assert not xla_bridge.backends_are_initialized(), "importing remat_opt started a backend"
heavy = {"flax", "optax", "equinox", "rich", "matplotlib"} & (sys.modules.keys() - loaded_by_jax)
assert not heavy, f"importing remat_opt loaded {sorted(heavy)}"
"""


def test_the_import_loads_and_changes_nothing_else() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_ALONE], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def declared(extra: str, project: dict) -> set[str]:
    """The distributions that the package with an extra asks for, those of the extras that it names included."""
    names: set[str] = set()
    for requirement in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if name == "remat-opt":
            names.update(*(declared(inner, project) for inner in extras.split(",")))
        names.add(name)
    return names


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_what_the_tests_import_is_declared(folder: str) -> None:
    """What a session installed by hand hides a missing dependency until a new machine runs the tests."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    files = list((PROJECT / folder).rglob("*.py"))
    ours = {file.stem for file in files} | {"tests", "benchmarks", "remat_opt"}
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module and not node.level)
    }
    foreign = imported - ours - sys.stdlib_module_names
    assert not foreign - declared("test", project)
