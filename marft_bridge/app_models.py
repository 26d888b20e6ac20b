"""A compiled graph -> what can be seen of each node's chat models and tools without running it.

A node's runnable is walked: attributes, closures, and the globals that its own code names. Invariants: nothing of the
app is called; what is only made when a node runs is said as such; where a model could be called unseen (by code of
somebody else, or out of the state), the node is not taken for one that has none. The walk ends after so many objects,
which counts as unseen too.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

_MOST_OBJECTS, _DEEPEST = 5000, 12
# Packages whose functions call no model but one that is handed to them, which the walk then meets itself.
_HARMLESS = {
    *("langchain", "langchain_core", "langgraph", "langgraph_supervisor", "langgraph_swarm"),
    *("numpy", "opentelemetry", "pydantic", "typing_extensions"),
}
_CALLING = {"http", "httplib", "importlib", "socket", "subprocess", "urllib"}  # of the standard library
# How models are called: where code does this, one may come with the state or the config.
_CALLS = {f"{a}{name}" for name in ("invoke", "stream", "batch", "generate", "predict") for a in ("", "a")}
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(slots=True)
class SeenNode:
    """What was seen of one node."""

    name: str  # as the recorder names it: `outer/inner` in a subgraph
    models: dict[str, BaseChatModel | None] = field(default_factory=dict)  # by name; None: made when the node runs
    tools: dict[str, None] = field(default_factory=dict)  # names that its models are offered, in order
    unseen: bool = False  # whether a model may hide where the walk did not go

    def holds(self, model: BaseChatModel) -> bool:
        """Whether this very model was seen in the node."""
        return any(seen is model for seen in self.models.values())


def graph_to_seen_nodes(graph: Any) -> list[SeenNode]:
    """Every node in the graph's order, those of subgraphs with their path; a node that only holds a subgraph is left
    out, as its calls are those of the nodes inside."""
    inner = {path.replace("|", "/") for path, _ in graph.get_subgraphs(recurse=True)}
    seen = []
    for name, node in _nodes(graph):
        look = _Look(SeenNode(name), has_inner=name in inner)
        look.at_root(node.bound)
        if name not in inner or look.node.models:
            seen.append(look.node)
    return seen


def _nodes(graph: Any) -> Iterator[tuple[str, Any]]:
    levels = [("", graph), *((f"{path.replace('|', '/')}/", sub) for path, sub in graph.get_subgraphs(recurse=True))]
    for prefix, level in levels:
        yield from ((f"{prefix}{name}", node) for name, node in level.nodes.items() if not name.startswith("__"))


class _Look:
    """One walk, of one node. Names are those that the code which led to an object uses."""

    def __init__(self, node: SeenNode, has_inner: bool) -> None:
        self.node, self._has_inner = node, has_inner
        self._met: dict[int, Any] = {}  # keeps what it met alive, so that no id is used twice

    def at_root(self, bound: Any) -> None:
        """Walks a node's runnable. A ToolNode offers its tools to nobody: it runs them, and they may call a model."""
        if isinstance(bound, ToolNode):
            for tool in bound.tools_by_name.values():
                self._attributes(tool, frozenset(), 1)
        else:
            self._at(bound, frozenset(), 0)

    def _at(self, found: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(found, _PLAIN) or id(found) in self._met:
            return
        if len(self._met) >= _MOST_OBJECTS or depth > _DEEPEST:
            self.node.unseen = True
            return
        self._met[id(found)] = found
        if isinstance(found, BaseChatModel):
            self.node.models[_model_name(found)] = found
        elif isinstance(found, BaseTool):
            self.node.tools[found.name] = None
        elif isinstance(found, Pregel):
            self.node.unseen |= not self._has_inner  # a graph that LangGraph does not know to be in this node
        elif isinstance(found, ModuleType):
            self._module(found, names, depth)
        elif isinstance(found, type):
            self._class(found, depth)
        elif isinstance(found, FunctionType):
            self._function(found, depth)
        elif isinstance(found, MethodType):
            code = getattr(found.__func__, "__code__", None)
            self._at(found.__func__, names, depth + 1)
            self._at(found.__self__, names | _names(code) if code is not None else names, depth + 1)
        elif isinstance(found, functools.partial):
            self._all((found.func, *found.args, *found.keywords.values()), names, depth)
        elif isinstance(found, Mapping):
            self._mapping(found, names, depth)
        elif isinstance(found, (list, tuple, set, frozenset)):
            self._all(found, names, depth)
        else:
            self._attributes(found, names, depth)

    def _all(self, found: Iterable[Any], names: frozenset[str], depth: int) -> None:
        for part in list(found):
            self._at(part, names, depth + 1)

    def _mapping(self, found: Mapping[Any, Any], names: frozenset[str], depth: int) -> None:
        """Bound options and tools in a provider's own form are tables: {"tools": [{"function": {"name": ...}}]}."""
        declared = found.get("function", found)
        if isinstance(declared, Mapping) and isinstance(declared.get("name"), str) and "parameters" in declared:
            self.node.tools[declared["name"]] = None
        else:
            self._all(found.values(), names, depth)

    def _module(self, found: ModuleType, names: frozenset[str], depth: int) -> None:
        if _is_library(getattr(found, "__file__", None) or ""):
            self._foreign(found.__name__)
        else:
            self._all((vars(found)[name] for name in names & vars(found).keys()), names, depth)

    def _class(self, found: type, depth: int) -> None:
        if issubclass(found, BaseChatModel):
            self.node.models[found.__name__] = None
        elif _is_users(found.__module__):
            self._all((part for part in vars(found).values() if isinstance(part, FunctionType)), frozenset(), depth)
        else:
            self._foreign(found.__module__)

    def _function(self, found: FunctionType, depth: int) -> None:
        if found.__name__ == "init_chat_model":
            self.node.models[found.__name__] = None
            return
        names = _names(found.__code__)
        self._all(_cells(found), names, depth)
        self._all((*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()), names, depth)
        if _is_library(found.__code__.co_filename):
            self._foreign(found.__module__)
            return
        self._all((found.__globals__[name] for name in names & found.__globals__.keys()), names, depth)
        self.node.unseen |= not names.isdisjoint(_CALLS)
        for module in _imports(found.__code__):
            self._foreign(module)

    def _attributes(self, found: Any, names: frozenset[str], depth: int) -> None:
        kind = type(found)
        self._all(getattr(found, "__dict__", {}).values(), names, depth)
        if _is_users(kind.__module__):
            used = {*names, "__call__"}
            self._all((part for part in (inspect.getattr_static(kind, n, None) for n in used) if part), names, depth)
        else:
            self._foreign(kind.__module__)

    def _foreign(self, module: str) -> None:
        """Code of others: of the standard library and of these packages it is known that no model hides there."""
        package = module.partition(".")[0]
        if package in _CALLING or not (package in _HARMLESS or package in sys.stdlib_module_names):
            self.node.unseen = True


def _model_name(model: BaseChatModel) -> str:
    said = next((name for key in ("model_name", "model") if isinstance(name := getattr(model, key, None), str)), None)
    return said or type(model).__name__


def _names(code: CodeType) -> frozenset[str]:
    """Every global and attribute that the code names, functions inside it included."""
    inside = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inside)


def _imports(code: CodeType) -> Iterator[str]:
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _imports(part)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<frozen")


def _is_users(module: str) -> bool:
    return not _is_library(getattr(sys.modules.get(module), "__file__", None) or "<frozen")
