"""The architecture's rules, read from the source itself: docs/architecture.md, "Floors"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "core/dpro").rglob("*.py"), *(ROOT / "dpro_integrations").rglob("*.py")])
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]
MAX_LINES = 500
FRAMEWORKS = {
    "torch", "torchvision", "lightning", "pytorch_lightning", "tensorflow", "keras", "tf_keras", "mxnet", "horovod",
    "byteps", "jax", "transformers",
}  # fmt: skip
NAME_FRAMEWORKS = {"dpro.report.doctor", "dpro.search.agent", "dpro.cost.fused_gnn"}
#: What an integration may import by the prefix of its name: it is of no use, and not imported, where that is not.
OWN_FRAMEWORKS = {
    "torch_": {"torch"}, "horovod_": {"horovod", "torch"},
    "mxnet": {"mxnet", "horovod", "byteps"},
    "keras": {"tensorflow", "keras", "horovod", "byteps"},
}  # fmt: skip


#: From the ground up; an import goes down, or stays on its floor.
FLOORS: list[set[str]] = [
    {"errors", "plan", "settings", "verdict", "_native", "__init__"},
    {"trace"},
    {"clock", "graph", "adapter"},
    {"cost", "replay"},
    {"passes"},
    {"report", "search"},
    {"tuner", "planning", "session", "outcome", "meeting"},  # all but the first are pieces of the tuner
    {"cli", "cli_output", "cli_whatif", "cli_place", "__main__", "dpro_integrations"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path: Path) -> str:
    """Dotted name: core/dpro/trace/model.py -> dpro.trace.model."""
    base = ROOT / "core" if path.is_relative_to(ROOT / "core") else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of the house a module belongs to: dpro.trace.model -> trace."""
    parts = module.split(".")
    if parts[0] == "dpro_integrations":
        return "dpro_integrations"
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Every module that the code imports, anywhere in it, by absolute name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            if node.level:
                base = base[: len(base) - node.level + (1 if is_package else 0)]
                name = ".".join(base + ([node.module] if node.module else []))
            else:
                name = node.module or ""
            if name in ("dpro", "dpro_integrations"):  # from dpro import tuner: the name may be a room
                yield from (f"{name}.{a.name}" if f"{name}.{a.name}" in MODULES else name for a in node.names)
            else:
                yield name


MODULES = {module_name(path) for path in SOURCES} | {"dpro._native"}


def our_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = imported(tree, module_name(path), path.name == "__init__.py")
    return {name for name in found if name.split(".")[0] in ("dpro", "dpro_integrations")}


def import_time_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not function bodies, not ``if TYPE_CHECKING``."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from import_time_nodes(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from import_time_nodes(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from import_time_nodes(handler.body)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_only_go_down(path: Path) -> None:
    room = room_of(module_name(path))
    assert room in FLOOR, f"{room} has no floor: give it one in {Path(__file__).name} and in docs/architecture.md"
    above = {name for name in our_imports(path) if FLOOR[room_of(name)] > FLOOR[room]}
    assert not above, f"{module_name(path)} (floor {FLOOR[room]}) imports what is above it: {sorted(above)}"


def test_rooms_on_one_floor_do_not_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for path in SOURCES:
        room = room_of(module_name(path))
        needs.setdefault(room, set()).update(room_of(name) for name in our_imports(path))
    # What the tuner is made of counts as one room; __init__ is the bare package.
    for room, others in needs.items():
        needs[room] = {o for o in others if FLOOR[o] == FLOOR[room] and o != room and FLOOR[o] != FLOOR["tuner"]}
    while True:
        leaves = {room for room, others in needs.items() if not others}
        if not leaves:
            break
        needs = {room: others - leaves for room, others in needs.items() if room not in leaves}
    assert not needs, f"rooms in a circle: {needs}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_framework_is_imported_with_the_module(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in import_time_nodes(tree.body):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    for prefix, own in OWN_FRAMEWORKS.items():
        if path.stem.startswith(prefix):
            found -= own
    assert not found & FRAMEWORKS, f"{path.name} imports {sorted(found & FRAMEWORKS)} before the user did"


def test_the_core_names_no_framework() -> None:
    # Not even inside functions: what differs between frameworks lives in dpro_integrations. The exceptions: the
    # doctor, which reports the versions installed, and networks that dpro itself trains.
    for path in SOURCES:
        module = module_name(path)
        if module.startswith("dpro.") and module not in NAME_FRAMEWORKS:
            names = {name.split(".")[0] for name in imported(ast.parse(path.read_text()), module, False)}
            assert not names & FRAMEWORKS, f"{module} imports {sorted(names & FRAMEWORKS)}"


def test_files_are_small_and_named_for_what_they_know() -> None:
    everything = [*SOURCES, *(ROOT / "core/native").glob("*.*"), *(ROOT / "benchmarks").rglob("*.py")]
    everything += (ROOT / "tests").rglob("*.py")
    long = {str(p.relative_to(ROOT)): n for p in everything if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"
    vague = [str(p.relative_to(ROOT)) for p in everything if p.stem in ("utils", "util", "helpers", "misc", "common")]
    assert not vague, f"a name that says nothing: {vague}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_every_module_says_what_it_knows(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"
