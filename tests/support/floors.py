"""Which folder stands on which floor, and the imports between folders as they are in the source.

A folder imports from floors below it only; `tests/test_imports.py` holds that, and docs/architecture.md draws it.
Imports are read with `ast`, so that one inside a function counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from support.paths import ROOT

PACKAGES = ("graphs", "marft_bridge", "trace_store", "trainers")

# From the top floor down. A name stands for a folder, or for one module where a package's root has several floors.
FLOORS = (
    "marft_bridge.cli",
    "marft_bridge.commands",
    "marft_bridge.view marft_bridge.live marft_bridge.erasure marft_bridge.move_plan marft_bridge.distillation",
    "marft_bridge.training marft_bridge.promotion",
    "marft_bridge.training.loggers marft_bridge.testing",
    "marft_bridge.fork_credit",
    "marft_bridge.forks",
    "marft_bridge.replay marft_bridge.comparison marft_bridge.agent_credit",
    "marft_bridge.rollouts.ray",
    "marft_bridge.rollouts",
    "marft_bridge.ingest",
    "marft_bridge.recording marft_bridge.traces",
    "marft_bridge.serving",
    "marft_bridge.serving.cpu",
    "marft_bridge.runs",
    "marft_bridge.devices",
    "marft_bridge.config",
    "marft_bridge.rewards",
    "marft_bridge.tasks",
    "marft_bridge.sandbox",
    "marft_bridge.model_calls.clients",
    "marft_bridge.model_calls",
    "marft_bridge.statistics",
    "marft_bridge.common",
    "trainers.learners",
    "trainers.checkpoint",
    "trainers.marft",
    "trainers.offline",
    "trainers.objective",
    "trainers.credit",
    "trainers.policies",
    "trainers.checks",
    "trainers.scoring",
    "trainers.export",
    "trainers.adapters",
    "trainers.config",
    "trainers.advantages",
    "trainers.batch",
    "trainers.rewards",
    "trainers.forest",
    "trainers.dependencies",
    "trainers.common",
    "trainers.errors",
    "trace_store graphs",
)
FRONT_DOORS = {"marft_bridge", "marft_bridge.__main__", "trainers"}  # they import upwards, late, for whoever asks them


def imports_of(source: str, package: str) -> Iterator[str]:
    """A module's source -> the dotted names that it imports; `package` is what a relative import starts from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imports_of_package(package: str) -> list[tuple[str, str]]:
    """A package -> (file, dotted name) of every import in it."""
    return [
        (str(path.relative_to(ROOT)), name)
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imports_of(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))
    ]


def is_under(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_of(file: str) -> str:
    """`trainers/common/files.py` -> trainers.common.files; a folder's __init__ is the folder."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(name: str) -> str | None:
    """The folder, or module with a floor of its own, that a dotted name lies in; None for a front door."""
    rooms = {room for floor in FLOORS for room in floor.split()}
    within = [room for room in rooms if is_under(name, {room})]
    return max(within, key=len, default=None)


@cache
def arrows_between_rooms() -> frozenset[tuple[str, str, str]]:
    """Every import across rooms: who, whose room, into which room."""
    arrows = set()
    for package in PACKAGES:
        for file, name in imports_of_package(package):
            module = module_of(file)
            room, target = room_of(module), room_of(name)
            if module not in FRONT_DOORS and name.split(".")[0] in PACKAGES and room != target:
                arrows.add((f"{module} imports {name}", str(room), str(target)))
    return frozenset(arrows)
