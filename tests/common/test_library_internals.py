"""Owns: what the package uses of LangGraph and LangChain that is private to them.

- Every such name is there, with the parameters that we give it; a release that moves one fails here, by name.
- Whoever meets such a release as a user gets one line, before anything is recorded or redirected.
- No module but the one that declares them imports a private name of these libraries.
"""

from __future__ import annotations

import ast
from importlib.metadata import version

import pytest
from langgraph.pregel._loop import PregelLoop
from packaging.version import Version
from support.paths import ROOT

from marft_bridge.common.errors import BridgeError
from marft_bridge.common.library_internals import (
    INTERNALS,
    TESTED_VERSIONS,
    Internal,
    broken_internals,
    require_internals,
)
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.recording.langgraph_hooks import TaskHooks

HOME = "marft_bridge/common/library_internals.py"


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    require_internals.cache_clear()


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: f"{internal.library}: {internal.name}")
def test_every_internal_name_is_as_it_was(internal: Internal) -> None:
    assert internal.problem() is None


def test_the_releases_that_are_said_to_be_tried_are_pinned_and_none_newer_is_installed() -> None:
    pins = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    assert {f"{library}=={newest}" for library, newest in TESTED_VERSIONS.items()} <= set(pins)
    assert [library for library, newest in TESTED_VERSIONS.items() if Version(version(library)) > Version(newest)] == []


def test_a_function_that_is_gone_is_named_before_anything_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PregelLoop, "output_writes")
    expected = rf"langgraph {version('langgraph')}: langgraph\.pregel\._loop\.PregelLoop\.output_writes is gone"
    with pytest.raises(BridgeError, match=expected):
        TaskHooks().attach()
    with pytest.raises(BridgeError, match=expected), redirected_models():
        pass


def test_a_parameter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PregelLoop, "put_writes", lambda self, task_id, writes: None)
    (line,) = broken_internals()
    assert "PregelLoop.put_writes takes no 'cached' any more (tried with" in line


def test_a_module_that_is_gone_is_named() -> None:
    assert Internal("langgraph", "langgraph.gone", "Loop").problem() == "langgraph.gone.Loop is gone"


def test_an_attribute_that_objects_no_longer_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PregelLoop.__annotations__, "prev_checkpoint_config")
    (line,) = broken_internals()
    assert "PregelLoop.prev_checkpoint_config is gone" in line


def test_every_attribute_of_a_graph_run_that_is_read_is_declared() -> None:
    """A run's loop is called `loop` wherever the recorder hands it on."""
    read = {
        node.attr
        for path in ROOT.glob("marft_bridge/recording/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "loop"
    }
    of_loops = [internal for internal in INTERNALS if internal.name.startswith("PregelLoop.")]
    declared = {internal.name.partition(".")[2] for internal in of_loops}
    declared |= {name for internal in of_loops for name in internal.parameters or ()}
    assert {"manager", "trigger_to_nodes"} <= read
    assert read - declared == set()


def private_imports(source: str) -> set[str]:
    """Dotted names of LangGraph and LangChain with a part that begins with an underscore, imported anywhere in it."""
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("langgraph", "langchain"))
        for alias in node.names
    }
    return {name for name in names if any(part.startswith("_") for part in name.split("."))}


def test_no_other_module_imports_what_is_private_to_them() -> None:
    found = {
        str(path.relative_to(ROOT)): private_imports(path.read_text()) for path in ROOT.glob("marft_bridge/**/*.py")
    }
    assert {path for path, names in found.items() if names} == {HOME}
    declared = [f"{internal.module}.{internal.name}" for internal in INTERNALS]
    assert [name for name in found[HOME] if not any(full.startswith(name) for full in declared)] == []
