"""Owns: no object of an app can break the look at it, and a library's code is never taken for the user's.

- Whatever misbehaves in a global that a node names, the models beside it are found, and nothing is raised.
- An installed package is a library's in every layer of an environment; an editable one only outside the project.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import types
import weakref
from collections import ChainMap, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from marft_bridge.rollouts import user_code
from marft_bridge.rollouts.app_models import inspect_nodes
from marft_bridge.rollouts.user_code import UserCode

MODEL = ChatOpenAI(model="found", api_key="k")


class Raises:
    """Every way of looking at it raises."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("leave me alone")

    __getattr__ = __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __contains__ = __call__ = _refuse  # type: ignore[assignment]
    __hash__ = __str__ = __repr__ = __getitem__ = __dir__ = __instancecheck__ = _refuse  # type: ignore[assignment]
    get = keys = values = items = name = _refuse


class RaisesEarlier(Raises):
    """So does every attribute that exists."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class IsAProxy:
    """As a proxy of a web framework outside of a request: even its class cannot be asked for."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")


class Endless(Mapping[str, Any]):
    """A mapping without an end, which must not be walked to it."""

    def __getitem__(self, key: str) -> Any:
        return self

    def __iter__(self) -> Iterator[str]:
        while True:
            yield "x"

    def __len__(self) -> int:
        return sys.maxsize


class DictThatRaises(dict[str, Any]):
    """A dict whose own methods are the app's."""

    def get(self, *_: Any) -> Any:
        raise KeyError("no")

    def values(self) -> Any:
        raise KeyError("no")

    items = __iter__ = values


class Meta(type):
    """A class whose class misbehaves."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("meta")

    def __hash__(cls) -> int:
        raise RuntimeError("meta")

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError("meta")


class OfMeta(metaclass=Meta):
    """An instance of such a class is as bad."""


class Slotted:
    """Without a __dict__, and with a slot that is not set."""

    __slots__ = ("unset",)


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def deep() -> Any:
    nested: Any = MODEL
    for _ in range(200):
        nested = [nested]
    return nested


def lazy_module() -> types.ModuleType:
    module = types.ModuleType("lazy")
    module.__getattr__ = Raises()._refuse  # type: ignore[method-assign]
    module.__file__ = None
    return module


ZOO: dict[str, Any] = {
    "weak keys": weakref.WeakKeyDictionary(),
    "weak values": weakref.WeakValueDictionary(),
    "weak set": weakref.WeakSet(),
    "a dead proxy": weakref.proxy(Raises),
    "raises": Raises(),
    "raises earlier": RaisesEarlier(),
    "a proxy": IsAProxy(),
    "endless": Endless(),
    "dict that raises": DictThatRaises(a=1),
    "metaclass": OfMeta,
    "of a metaclass": OfMeta(),
    "slots": Slotted(),
    "itself": itself(),
    "deep": deep(),
    "lazy module": lazy_module(),
    "user dict": UserDict(a=1),
    "chain map": ChainMap({}),
    "default dict": defaultdict(Raises),
    "hostile members": {"function": Raises(), "name": Raises(), "parameters": Raises()},
    "hostile keys": {1: Raises(), (2,): IsAProxy()},
    "partial": functools.partial(Raises._refuse, Raises()),
    "many": [object() for _ in range(20_000)],
    "view": memoryview(b"x"),
    "mapping proxy": types.MappingProxyType(DictThatRaises(a=Raises())),
}
THING: Any = None


def node_with(thing: Any) -> Any:
    """A node whose code names a global, calls a model, and names another global after it."""
    code = "def node(state):\n    FIRST.get('x'); LAST\n    return {'messages': [THING, MODEL.invoke(state)]}\n"
    module: dict[str, Any] = {"FIRST": thing, "THING": thing, "MODEL": MODEL, "LAST": thing}
    exec(compile(code, "app.py", "exec"), module)  # noqa: S102 - a module of its own, with these globals
    return module["node"]


def graph_of(node: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph.compile()


@pytest.mark.parametrize("name", ZOO)
def test_no_global_of_an_app_breaks_the_look_at_it(name: str) -> None:
    (node,) = inspect_nodes(graph_of(node_with(ZOO[name])))
    assert name == "many" or list(node.models) == ["found"]  # of too many objects some are not visited, which is marked
    assert node.may_hide_model


@pytest.mark.parametrize("name", ZOO)
def test_an_object_that_holds_such_a_thing_is_looked_at_too(name: str) -> None:
    class Holder:
        def __init__(self) -> None:
            self.thing, self.model = ZOO[name], MODEL

        def node(self, state: MessagesState) -> Any:
            return {"messages": [self.model.invoke(str(self.thing))]}

    (node,) = inspect_nodes(graph_of(Holder().node))
    assert name == "many" or list(node.models) == ["found"]


# Whose code it is


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A project with an environment, the layers under it, and packages installed editable."""
    project = tmp_path / "work" / "project"
    project.mkdir(parents=True)
    (project / "pyproject.toml").touch()
    monkeypatch.chdir(project)
    folders = {
        "own environment": project / ".venv/lib/python3.11/site-packages/pkg/a.py",
        "system": tmp_path / "usr/lib/python3/dist-packages/pkg/a.py",
        "user site": tmp_path / "home/.local/lib/python3.11/site-packages/pkg/a.py",
        "other environment": tmp_path / "opt/venv/lib/python3.12/site-packages/pkg/a.py",
        "editable library": tmp_path / "src/library/pkg/a.py",
        "editable app": project / "src/app/a.py",
        "file": project / "app.py",
        "elsewhere": tmp_path / "scripts/app.py",
    }
    roots = (tmp_path / "src/library", project)
    monkeypatch.setattr(user_code, "_editable_roots", lambda: tuple(root.resolve() for root in roots))
    return folders


def test_installed_code_is_a_librarys_in_every_layer_of_an_environment(layers: dict[str, Path]) -> None:
    code = UserCode(None)
    users = {name for name, path in layers.items() if not code.is_library_file(str(path))}
    assert users == {"editable app", "file", "elsewhere"}
    assert code.is_library_file(asyncio.__file__)
    assert code.is_library_file("<frozen importlib>")
    assert not code.is_library_file("<string>")


def test_the_package_that_holds_the_app_is_the_users_wherever_the_command_runs(layers: dict[str, Path]) -> None:
    assert UserCode(None).is_library_file(str(layers["editable library"]))
    app_name = f"{layers['editable library'].parent / 'app.py'}:graph"
    assert not UserCode(app_name).is_library_file(str(layers["editable library"]))
