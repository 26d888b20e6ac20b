"""A compiled graph -> its agents, each with the chat models and tools that show without running it.

The walk follows a node's runnable through attributes, closures and the globals that its own code names, and goes on
inside every graph that it meets there: subgraphs, agents behind tools, several agents in one node. Invariants: nothing
of the app is called, and no object of the app can break the walk; a model that a node makes only when it runs is listed
as None; a node that could reach a model out of sight (in the code of a library, or in the state) is marked
`may_hide_model`, one that could run an unknown agent `may_hide_agent`, and so is one whose walk was cut or broke.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from marft_bridge.common.agent_names import Actor, metadata_to_name, node_to_actor
from marft_bridge.common.error_handlers import ERROR_HANDLER
from marft_bridge.rollouts.attribute_uses import Uses, variable_to_uses
from marft_bridge.rollouts.user_code import UserCode

_MAX_OBJECTS, _MAX_DEPTH = 5000, 12
_LONGEST_NAME = 100  # a longer text in code is a prompt
_MAX_NESTED = 8  # graphs inside graphs
ROUTER = ":router"
START = "__start__"
# Packages whose functions only call a model that is passed to them, which the walk visits anyway.
_MODEL_FREE = {
    "langchain",
    "langchain_core",
    "langgraph",
    "langgraph_supervisor",
    "langgraph_swarm",
    "numpy",
    "opentelemetry",
    "pydantic",
    "typing_extensions",
}
# Modules of the standard library through which code can reach a model.
_CAN_CALL_OUT = {"http", "httplib", "importlib", "socket", "subprocess", "urllib"}
# Methods by which models are called: code that names one may call a model out of the state or the config.
_MODEL_METHODS = {f"{a}{name}" for name in ("invoke", "stream", "batch", "generate", "predict") for a in ("", "a")}
# Names in code that makes agents when it runs, or is given them by whoever runs the graph.
_MAKES_AGENTS = re.compile(r"create_\w*(agent|supervisor|swarm)|StateGraph|MessageGraph|configurable|context")
_FUNCTIONAL = "langgraph.func"  # where the class of what @task makes is defined
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(slots=True)
class InspectedNode:
    """An agent, or a node that is none, with the models and tools that the walk met in it."""

    name: str  # as the recorder names it: the agent's declared name, else its path, `outer/inner` in a subgraph
    models: dict[str, BaseChatModel | None] = field(default_factory=dict)  # by name; None: made when the node runs
    tools: dict[str, None] = field(default_factory=dict)  # names of the tools that its models are offered, in order
    may_hide_model: bool = False  # the node may reach a model where the walk did not go
    may_hide_agent: bool = False  # the node may run a graph that the walk did not meet
    runs_tools: bool = False  # the models are those of its tools, not of an agent
    path: str = ""  # LangGraph's, which is the name of an agent that declares none
    holds_graph: bool = False  # it only runs the graphs inside it
    graph_nodes: set[int] = field(default_factory=set)  # ids of LangGraph's nodes that act under this name

    def holds(self, model: BaseChatModel) -> bool:
        """Whether the walk met this model object in the node."""
        return any(known_model is model for known_model in self.models.values())

    def add(self, namesake: InspectedNode) -> None:
        """Takes in what was met in another node of the same name."""
        self.models |= namesake.models
        self.tools |= namesake.tools
        self.may_hide_model |= namesake.may_hide_model
        self.may_hide_agent |= namesake.may_hide_agent
        self.graph_nodes |= namesake.graph_nodes


def inspect_nodes(graph: Any, app_name: str | None = None) -> list[InspectedNode]:
    """Inspects every node in the graph's order, then those of the graphs inside it. A node that only holds a subgraph
    is left out, as its calls are those of the inner nodes.

    Args:
        app_name: as in graph.app, where known: code of its project is the user's, and walked.
    """
    return [node for node in inspect_places(graph, app_name) if not node.holds_graph]


def inspect_places(graph: Any, app_name: str | None = None) -> list[InspectedNode]:
    """Every node, those that only hold a subgraph too; two nodes in which the same agent acts are one."""
    nodes_by_name: dict[tuple[str, bool], InspectedNode] = {}
    for node in _inspect_graph(_Level(graph, UserCode(app_name))):
        known_node = nodes_by_name.setdefault((node.name, node.holds_graph), node)
        if known_node is not node:
            known_node.add(node)
    return list(nodes_by_name.values())


def ambiguity_lines(nodes: Iterable[InspectedNode]) -> list[str]:
    """A line for each name under which several graphs act, and how to tell them apart."""
    return [
        namesakes_to_line(node.name, len(node.graph_nodes))
        for node in nodes
        if len(node.graph_nodes) > 1 and not node.holds_graph and (node.models or node.may_hide_model)
    ]


def namesakes_to_line(agent: str, count: int) -> str:
    """What to say of several graphs under one name."""
    return (
        f"{count} agents are called {agent!r} and share one adapter: if they should not, tell them apart by "
        "create_agent(name=...), or by the metadata `lc_agent_name` of another graph"
    )


@dataclass(frozen=True, slots=True)
class _Level:
    """A graph, and where it runs."""

    graph: Any
    code: UserCode
    outer: Actor | None = None  # who acts in the node around it
    prefix: str = ""  # LangGraph's path of that node, with its slash
    above: tuple[int, ...] = ()  # ids of the nodes around it, so that an agent that calls itself is visited once

    @property
    def name_in_force(self) -> str | None:
        """The agent name that its tasks run under."""
        declared_name = metadata_to_name((getattr(self.graph, "config", None) or {}).get("metadata"))
        return declared_name or (self.outer.declared_name if self.outer is not None else None)

    def actor(self, node: str) -> Actor:
        """Who acts in one of its nodes."""
        return node_to_actor(node, self.name_in_force, self.outer)


def _inspect_graph(level: _Level) -> Iterator[InspectedNode]:
    """The nodes of one level, then those of the graphs inside each of them."""
    listed_graphs = dict(level.graph.get_subgraphs()) if hasattr(level.graph, "get_subgraphs") else {}
    inner_levels: list[_Level] = []
    for name, node in level.graph.nodes.items():
        if not name.startswith("__"):
            place = _Place(level, level.actor(name), f"{level.prefix}{name}", id=id(node))
            yield from _inspect_node(place, node.bound, listed_graphs.get(name), inner_levels=inner_levels)
    yield from _inspect_routers(level)
    yield from _inspect_error_handlers(level)
    for inner_level in inner_levels:
        yield from _inspect_graph(inner_level)


@dataclass(frozen=True, slots=True)
class _Place:
    """A node of a level, or a task that a node calls."""

    level: _Level
    actor: Actor
    path: str
    id: int


def _inspect_node(place: _Place, bound: Any, listed_graph: Any, inner_levels: list[_Level]) -> Iterator[InspectedNode]:
    """A node, and the tasks of the functional API that it calls. The graphs inside them join `inner_levels`."""
    level = place.level
    walk = _NodeWalk(InspectedNode(place.actor.agent, path=place.path, graph_nodes={place.id}), level.code)
    walk.walk_root(bound)
    walk.node.holds_graph = listed_graph is not None and not walk.node.models
    walk.finish()
    yield walk.node
    if place.id in level.above or len(level.above) >= _MAX_NESTED:
        return
    inner = _Level(level.graph, level.code, place.actor, prefix=f"{place.path}/", above=(*level.above, place.id))
    graphs = _distinct_graphs([*([listed_graph] if listed_graph is not None else []), *walk.graphs])
    inner_levels += [replace(inner, graph=graph) for graph in graphs]
    for task in walk.tasks:
        name = str(getattr(task.func, "name", None) or task.func.__name__)
        actor = node_to_actor(name, place.actor.declared_name, place.actor)
        task_place = _Place(inner, actor, f"{place.path}/{name}", id=id(task))
        yield from _inspect_node(task_place, task.func, None, inner_levels=inner_levels)


def _inspect_routers(level: _Level) -> Iterator[InspectedNode]:
    """The routing functions that were seen to hold a model: agents of their own, `writer:router`."""
    branches_by_node = getattr(getattr(level.graph, "builder", None), "branches", None) or {}
    for start, branches in dict(branches_by_node).items():
        node = InspectedNode(f"{level.actor(start).agent}{ROUTER}", path=f"{level.prefix}{start}{ROUTER}")
        for branch in branches.values():
            walk = _NodeWalk(node, level.code)
            walk.walk_router(getattr(branch, "path", None))
        if node.models:
            yield node


def _inspect_error_handlers(level: _Level) -> Iterator[InspectedNode]:
    """The error handlers that were seen to hold a model: agents of their own, `writer:error_handler`."""
    for name, served_node in level.graph.nodes.items():
        handler = level.graph.nodes.get(getattr(served_node, "error_handler_node", None))
        if handler is not None:
            path = f"{level.prefix}{name}{ERROR_HANDLER}"
            node = InspectedNode(f"{level.actor(name).path}{ERROR_HANDLER}", path=path, graph_nodes={id(handler)})
            walk = _NodeWalk(node, level.code)
            walk.walk_root(handler.bound)
            walk.finish()
            if node.models:
                yield node


def _distinct_graphs(graphs: Sequence[Any]) -> list[Any]:
    """Each graph once; `with_config` and `wrap` copy a graph, whose nodes stay the same objects."""
    by_nodes: dict[frozenset[int], Any] = {}
    for graph in graphs:
        if isinstance(graph, Pregel):  # one that runs elsewhere has no nodes to inspect
            by_nodes.setdefault(frozenset(id(node) for node in graph.nodes.values()), graph)
    return list(by_nodes.values())


class _NodeWalk:
    """The walk through one node. `names` are the globals and attributes that the code leading to an object names: only
    those of a module or an object are followed."""

    def __init__(self, node: InspectedNode, code: UserCode) -> None:
        self.node, self._code = node, code
        self.graphs: list[Any] = []  # met in the node, whether or not LangGraph lists them as its subgraphs
        self.tasks: list[Any] = []  # of the functional API, which run as nodes of their own
        self._visited: dict[int, Any] = {}  # by id; the reference keeps an object alive, so that no id is used twice
        self._visited_methods: dict[tuple[int, FunctionType], Any] = {}  # of which object; the reference as above
        self._tools: list[Any] = []
        self._names_model_method = False

    def walk_root(self, bound: Any) -> None:
        """Walks a node's runnable. A ToolNode offers its tools to no model: it runs them, and they may call one."""
        if isinstance(bound, ToolNode):
            self._walk_tools(list(bound.tools_by_name.values()))
            return
        self._visit(bound, frozenset(), 0)
        if not self.node.models and not self.graphs and self._tools:  # a node of the app's own that runs tools
            self._walk_tools(self._tools)

    def walk_router(self, path: Any) -> None:
        """Walks a routing function. Those of ready-made agents hold the tools that they route to, and run none."""
        self._visit(path, frozenset(), 0)

    def _walk_tools(self, tools: Sequence[Any]) -> None:
        self.node.runs_tools = True
        for tool in tools:
            try:
                self._visit_attributes(tool, frozenset(), 1)
            except Exception:  # noqa: BLE001 - see `_visit`
                self._note_unknown()

    def finish(self) -> None:
        """Concludes what the node may hide, when all of it was walked."""
        if self._names_model_method:
            self.node.may_hide_model = True
            self.node.may_hide_agent |= not self.node.models and not self.graphs

    def _note_unknown(self) -> None:
        self.node.may_hide_model = self.node.may_hide_agent = True

    def _visit(self, value: Any, names: frozenset[str], depth: int) -> None:
        kind = type(value)  # not isinstance(), which asks the object itself: it may raise, or be a proxy of another
        if issubclass(kind, _PLAIN) or id(value) in self._visited:
            return
        if len(self._visited) >= _MAX_OBJECTS or depth > _MAX_DEPTH:
            self._note_unknown()
            return
        self._visited[id(value)] = value
        try:
            self._visit_by_kind(value, kind, names, depth=depth)
        except Exception:  # noqa: BLE001 - an object of the app that cannot be looked at: whatever it is, it is unknown
            self._note_unknown()

    def _visit_by_kind(self, value: Any, kind: type, names: frozenset[str], depth: int) -> None:
        if issubclass(kind, BaseChatModel):
            self.node.models[_model_name(value)] = value
        elif issubclass(kind, BaseTool):
            self.node.tools[value.name] = None
            self._tools.append(value)
        elif issubclass(kind, Pregel):
            self.graphs.append(value)
        elif kind.__module__ == _FUNCTIONAL and callable(getattr(value, "func", None)):
            self.tasks.append(value)
        elif issubclass(kind, ModuleType):
            self._visit_module(value, names, depth)
        elif issubclass(kind, type):
            self._visit_class(value, depth)
        elif issubclass(kind, FunctionType):
            self._visit_function(value, depth)
        elif issubclass(kind, MethodType):
            self._visit_method(value, names, depth)
        elif issubclass(kind, functools.partial):
            self._visit_all((value.func, *value.args, *value.keywords.values()), names, depth)
        elif issubclass(kind, dict):
            self._visit_mapping(dict(dict.items(value)), names, depth)
        elif kind is MappingProxyType:
            self._visit_mapping(dict(value), names, depth)
        elif (plain_kind := next((k for k in (list, tuple, set, frozenset) if issubclass(kind, k)), None)) is not None:
            self._visit_all(plain_kind.__iter__(value), names, depth)
        else:
            self._visit_attributes(value, names, depth)

    def _visit_all(self, values: Iterable[Any], names: frozenset[str], depth: int) -> None:
        for value in list(values):
            self._visit(value, names, depth + 1)

    def _visit_mapping(self, mapping: Mapping[Any, Any], names: frozenset[str], depth: int) -> None:
        """Bound options, and tools in a provider's own form, are dicts: {"tools": [{"function": {"name": ...}}]}."""
        declared = mapping.get("function", mapping)
        if issubclass(type(declared), dict) and isinstance(declared.get("name"), str) and "parameters" in declared:
            self.node.tools[declared["name"]] = None
        else:
            self._visit_all(mapping.values(), names, depth)

    def _visit_module(self, module: ModuleType, names: frozenset[str], depth: int) -> None:
        if self._code.is_library_file(str(vars(module).get("__file__") or "")):
            self._note_library(str(vars(module).get("__name__")))
        else:
            self._visit_all((vars(module)[name] for name in names & vars(module).keys()), names, depth)

    def _visit_class(self, cls: type, depth: int) -> None:
        if issubclass(cls, BaseChatModel):
            self.node.models[cls.__name__] = None
        elif self._is_users(cls.__module__):
            self._visit_all((part for part in vars(cls).values() if isinstance(part, FunctionType)), frozenset(), depth)
        else:
            self._note_library(cls.__module__)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        if function.__name__ == "init_chat_model":
            self.node.models[function.__name__] = None
            return
        code = function.__code__
        names = _code_names(code)
        is_library = self._code.is_library_file(code.co_filename)
        for variable, value in _closure_values(function):
            self._visit_used(value, None if is_library else variable_to_uses(code, variable), names, depth=depth)
        self._visit_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), names, depth)
        if is_library:
            self._note_library(str(function.__module__))
            return
        for variable in names & function.__globals__.keys():
            self._visit_used(function.__globals__[variable], variable_to_uses(code, variable), names, depth=depth)
        self._names_model_method |= not names.isdisjoint(_MODEL_METHODS)
        words = {*names, *(word for word in _code_texts(code) if len(word) <= _LONGEST_NAME)}
        self.node.may_hide_agent |= any(_MAKES_AGENTS.fullmatch(word) for word in words)
        for module in _imported_modules(code):
            self._note_library(module)

    def _visit_method(self, method: MethodType, names: frozenset[str], depth: int) -> None:
        """Of an object of the user's, a method reaches what its code takes of it, by way of other methods too."""
        owner, code = method.__self__, getattr(method.__func__, "__code__", None)
        self._visit(method.__func__, names, depth + 1)
        if code is not None and code.co_argcount and self._shows_uses(type(owner)):
            self._visit_used(owner, variable_to_uses(code, code.co_varnames[0]), names | _code_names(code), depth=depth)
        else:
            self._visit(owner, names | _code_names(code) if code is not None else names, depth + 1)

    def _visit_used(self, value: Any, uses: Uses, names: frozenset[str], depth: int) -> None:
        """Visits what is taken of a value, and all of it where that is not known."""
        try:
            if uses is None or not self._shows_uses(type(value)):
                self._visit(value, names, depth + 1)
            elif depth > _MAX_DEPTH:
                self._note_unknown()
            else:
                self._visit_members(value, uses, names, depth=depth)
        except Exception:  # noqa: BLE001 - see `_visit`
            self._note_unknown()

    def _visit_members(self, value: Any, uses: Mapping[str, Uses], names: frozenset[str], depth: int) -> None:
        attributes = _attributes_of(value)
        for name, inner_uses in uses.items():
            member = attributes[name] if name in attributes else inspect.getattr_static(type(value), name, None)
            if name in attributes:
                self._visit_used(member, inner_uses, names, depth=depth + 1)
            elif (function := _member_to_function(member)) is None:
                self._visit(member, names, depth + 1)
            elif (id(value), function) not in self._visited_methods:
                self._visited_methods[id(value), function] = value
                self._visit_method(MethodType(function, value), names, depth + 1)

    def _shows_uses(self, kind: type) -> bool:
        """Whether what code takes of such an object are the attributes that it names: the class is the user's, has no
        attributes that are made when they are asked for, and is none that the walk knows better."""
        known_kinds = (BaseChatModel, BaseTool, Pregel, type, ModuleType, FunctionType, MethodType, dict, list, tuple)
        return (
            not issubclass(kind, (*known_kinds, *_PLAIN, set, frozenset, functools.partial))
            and self._is_users(kind.__module__)
            and not any({"__getattr__", "__getattribute__"} & vars(base).keys() for base in kind.__mro__[:-1])
        )

    def _visit_attributes(self, value: Any, names: frozenset[str], depth: int) -> None:
        kind = type(value)
        self._visit_all(dict.values(_attributes_of(value)), names, depth)
        if self._is_users(kind.__module__):
            members = (inspect.getattr_static(kind, name, None) for name in {*names, "__call__"})
            self._visit_all((member for member in members if member), names, depth)
        else:
            self._note_library(kind.__module__)

    def _is_users(self, module: str) -> bool:
        return not self._code.is_library_file(str(getattr(sys.modules.get(module), "__file__", None) or "<frozen"))

    def _note_library(self, module: str) -> None:
        """Marks the node where its code enters a library that may call a model."""
        package = module.partition(".")[0]
        if package in _CAN_CALL_OUT or not (package in _MODEL_FREE or package in sys.stdlib_module_names):
            self._note_unknown()


def _attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds itself, without asking it."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _member_to_function(member: Any) -> FunctionType | None:
    """The function that a member of a class runs with the object as its first argument; None for another member."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, FunctionType) else None


def _model_name(model: BaseChatModel) -> str:
    names = (getattr(model, key, None) for key in ("model_name", "model"))
    return next((name for name in names if isinstance(name, str)), None) or type(model).__name__


def _code_names(code: CodeType) -> frozenset[str]:
    """Every global and attribute that the code names, inner functions included."""
    inner_names = (_code_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner_names)


def _code_texts(code: CodeType) -> Iterator[str]:
    """Every text that the code holds, as the key in `config["configurable"]`, inner functions included."""
    for part in code.co_consts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, CodeType):
            yield from _code_texts(part)


def _imported_modules(code: CodeType) -> Iterator[str]:
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _imported_modules(part)


def _closure_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables from around a function, with their values."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield variable, cell.cell_contents
        except ValueError:  # an empty cell: the variable is not assigned yet
            continue
