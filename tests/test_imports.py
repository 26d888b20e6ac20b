"""Owns: which package may import which, and what importing costs.

- The arrows of the design hold: marft_bridge -> {graphs, trainers, trace_store}, trainers -> trace_store.records,
  trace_store -> DuckDB and Arrow, graphs -> LangGraph. Read from the source with `ast`, so that an import inside
  a function counts too.
- Nothing imports the model server: it is another process. One module of ours runs in that one, and nothing imports it.
- `import marft_bridge` is cheap, and the trainer imports on a machine that has neither vLLM, LangGraph nor DuckDB.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("graphs", "marft_bridge", "trace_store", "trainers")

# What a package may name of ours, itself apart: a prefix allows everything under it.
OURS = {
    "graphs": set(),
    "marft_bridge": {"graphs", "trace_store", "trainers"},
    "trace_store": set(),
    "trainers": {"trace_store.records"},
}
# What it may name of others', the standard library apart. The bridge joins everything, so it may name every dependency.
THEIRS = {
    "graphs": {"langchain_core", "langgraph"},
    "trace_store": {"duckdb", "numpy", "pyarrow"},
    "trainers": {"accelerate", "numpy", "peft", "pydantic", "safetensors", "torch", "transformers"},
}

INSIDE_THE_SERVER = "marft_bridge/cpu_worker.py"  # named on its command line


def imports_of(source: str, package: str) -> Iterator[str]:
    """A module's source -> the dotted names that it imports; `package` is what a relative import starts from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of_package(package: str) -> list[tuple[str, str]]:
    """A package -> (file, dotted name) of every import in it."""
    return [
        (str(path.relative_to(ROOT)), name)
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imports_of(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))
    ]


def is_under(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def seconds_of(code: str, *, runs: int) -> float:
    """The quickest of several runs of the interpreter on `code`: what it costs when nothing else is going on."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        best = min(best, time.perf_counter() - start)
    return best


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


def test_importing_the_bridge_takes_less_than_three_tenths_of_a_second() -> None:
    own = seconds_of("import marft_bridge", runs=5) - seconds_of("pass", runs=5)
    assert own < 0.3


def test_trainer_options_are_read_without_torch() -> None:
    code = "import trainers.config, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


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
    assert int(run.stdout) == len([p for p in (ROOT / "trainers").rglob("*.py") if p.name != "__init__.py"])
