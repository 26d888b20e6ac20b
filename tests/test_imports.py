"""Owns: which folder may import which, and what importing costs.

- The arrows of the design hold: marft_bridge -> {trainers, trace_store}, trainers -> three modules of
  trace_store, trace_store -> DuckDB and Arrow, graphs -> LangGraph and nothing of ours, nobody -> graphs. Read from
  the source with `ast`, so that an import inside a function counts too.
- Every folder of the four packages stands on a floor, and imports from floors below it only: `FLOORS`.
- Nothing imports the model server: it is another process. One module of ours runs in that one, and nothing imports it.
- `import marft_bridge` is cheap, and the trainer imports on a machine that has neither vLLM, LangGraph nor DuckDB.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.floors import (
    FLOORS,
    FRONT_DOORS,
    PACKAGES,
    arrows_between_rooms,
    imports_of,
    imports_of_package,
    is_under,
    module_of,
    room_of,
)
from support.paths import ROOT

# What a package may name of ours, itself apart: a prefix allows everything under it.
OURS = {
    "graphs": set(),
    "marft_bridge": {"trace_store", "trainers"},
    "trace_store": set(),
    "trainers": {"trace_store.errors", "trace_store.import_name", "trace_store.records"},
}
# What it may name of others', the standard library apart. The bridge joins everything, so it may name every dependency.
THEIRS = {
    "graphs": {"langchain_core", "langgraph"},
    "trace_store": {"duckdb", "numpy", "orjson", "pyarrow"},
    "trainers": {"accelerate", "bitsandbytes", "numpy", "peft", "pydantic", "safetensors", "torch", "transformers"},
}

INSIDE_THE_SERVER = "marft_bridge/serving/cpu/worker.py"  # named on its command line


def test_the_reader_of_imports_sees_every_form() -> None:
    source = (
        "import a.b, c as d\n"
        "from e.f import g\n"
        "from . import h\n"
        "from .i import j\n"
        "from ..k import l\n"
        "def late():\n"
        "    import m\n"
    )
    assert set(imports_of(source, "p.q")) == {"a.b", "c", "e.f.g", "p.q.h", "p.q.i.j", "p.k.l", "m"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_our_packages_point_down_only(package: str) -> None:
    imports = imports_of_package(package)
    assert imports, f"{package} has no module that imports anything: the reader looked in the wrong place"
    ours = [(file, name) for file, name in imports if name.split(".")[0] in PACKAGES]
    wrong = [f"{file} imports {name}" for file, name in ours if not is_under(name, OURS[package] | {package})]
    assert not wrong


def test_every_folder_with_code_has_a_floor_and_every_floor_has_folders() -> None:
    modules = {
        module_of(str(path.relative_to(ROOT))) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert {module for module in modules if room_of(module) is None} == FRONT_DOORS
    rooms = {room for floor in FLOORS for room in floor.split()}
    assert {room for room in rooms if room not in modules} == set()
    nested = {module.rpartition(".")[0] for module in modules} - {"", *PACKAGES}
    assert {folder for folder in nested if folder not in rooms} == set()


def test_a_folder_imports_from_floors_below_it_only() -> None:
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor.split()}
    arrows = arrows_between_rooms()
    assert len(arrows) > 500, "the reader looked in the wrong place"
    assert sorted(what for what, room, target in arrows if floor_of.get(room, -1) >= floor_of.get(target, -1)) == []


def test_in_the_root_of_the_bridge_stand_the_front_doors_and_folders() -> None:
    files = {path.name for path in (ROOT / "marft_bridge").iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "cli.py", "py.typed"}


@pytest.mark.parametrize("package", sorted(THEIRS))
def test_a_lower_package_names_only_the_libraries_that_it_is_about(package: str) -> None:
    known = sys.stdlib_module_names | set(PACKAGES)
    theirs = [(file, name) for file, name in imports_of_package(package) if name.split(".")[0] not in known]
    wrong = [f"{file} imports {name}" for file, name in theirs if not is_under(name, THEIRS[package])]
    assert not wrong


def test_no_module_imports_the_model_server() -> None:
    everything = [pair for package in PACKAGES for pair in imports_of_package(package)]
    of_server = [file for file, name in everything if name.split(".")[0] == "vllm"]
    assert set(of_server) == {INSIDE_THE_SERVER}
    module = INSIDE_THE_SERVER.removesuffix(".py").replace("/", ".")
    assert [f"{file} imports {name}" for file, name in everything if is_under(name, {module})] == []


def test_importing_the_bridge_loads_none_of_the_heavy_libraries() -> None:
    code = "import marft_bridge, sys; print([m for m in ('torch', 'vllm', 'duckdb', 'langgraph') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_trainer_options_are_read_without_torch() -> None:
    code = "import trainers.config, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


@pytest.mark.slow
def test_every_trainer_module_imports_without_vllm_langgraph_and_duckdb() -> None:
    """A GPU machine used only for training has none of the three (design, "Where it grows")."""
    code = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"duckdb", "langchain_core", "langgraph", "vllm"}:
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)

sys.meta_path.insert(0, Absent())
try:
    import duckdb
except ModuleNotFoundError:
    pass
else:
    sys.exit("the blocker does not block")

import trainers
found = [m.name for m in pkgutil.walk_packages(trainers.__path__, "trainers.")]
for name in found:
    importlib.import_module(name)
print(len(found))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == len(list((ROOT / "trainers").rglob("*.py"))) - 1  # without the package's own __init__
