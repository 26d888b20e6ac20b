"""Random graphs whose nodes run random programs -> the app, and its dependency matrix, worked out from the drawing.

The drawing says what every node reads and writes, what it does inside, and where its routers lead. `drawn_to_edges`
carries the writers of every key through the layers by hand-written rules for each kind of key; it shares no code with
the recorder or the store. `Witness` is the other proof: every answer is a token of its own, nodes write all tokens
that they have met, and each prompt is kept, so what reached which prompt is read off the run itself.
"""

from __future__ import annotations

import asyncio
import operator
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage
from langchain_core.outputs import ChatResult
from langchain_core.tools import StructuredTool
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from support.edge_rig import SaysNext, source_to_function

PLAIN = ("k0", "k1", "k2")  # the last value
# all values; the last one, by a reducer of the app's own; a text made of all; the newest two entries; messages by id
KEYS = (*PLAIN, "log", "newest", "joined", "window", "messages")
TOKEN = re.compile(r"<[^<>]+>")

Edge = tuple[str, str, str, bool]  # source, sink, kind, exact
Sources = dict[str, bool]  # whose value, certainly or possibly


@dataclass(frozen=True)
class Item:
    """Something that a node does: `call`, `agent` (a graph of calls in a row), `tool` or `gather` (of others)."""

    kind: str
    labels: tuple[str, ...] = ()  # of calls: their answers
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Router:
    """A conditional edge: which nodes of the next layer it chooses, and its answer where it asks a model."""

    chooses: tuple[str, ...]
    label: str | None


@dataclass(frozen=True)
class Node:
    """A drawn node: `layer` is the superstep in which it runs."""

    name: str
    layer: int
    program: tuple[Item, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    window_entries: int  # how many it writes to the window
    removes: str | None  # the id of a message
    after: tuple[str, ...]  # nodes of the layer before with an edge to it
    routers: tuple[Router, ...] = ()


@dataclass(frozen=True)
class Drawing:
    nodes: tuple[Node, ...]
    entry_routers: tuple[Router, ...]


# -- drawing ----------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn, name: str) -> tuple[Item, ...]:
    number = 0

    def label() -> str:
        nonlocal number
        number += 1
        return f"<{name}.{number}>"

    def item(depth: int, kinds: tuple[str, ...]) -> Item:
        kind = draw(st.sampled_from(kinds))
        if kind == "call":
            return Item("call", (label(),))
        if kind == "agent":
            return Item("agent", tuple(label() for _ in range(draw(st.integers(0, 2)))))
        inner = ("call", "agent", "tool") if depth == 0 else ("call", "agent")
        low = 2 if kind == "gather" else 0
        count = draw(st.integers(low, 2))
        return Item(kind, (), tuple(item(depth + 1, inner) for _ in range(count)))

    return tuple(item(0, ("call", "call", "agent", "tool", "gather")) for _ in range(draw(st.integers(0, 3))))


@st.composite
def drawings(draw: st.DrawFn) -> Drawing:
    nodes: list[Node] = []
    names_by_layer = [
        [f"n{layer}{number}" for number in range(draw(st.integers(1, 3)))]
        for layer in range(1, draw(st.integers(2, 4)) + 1)
    ]

    def routers(name: str, later: list[str]) -> tuple[Router, ...]:
        return tuple(
            Router(
                tuple(draw(st.lists(st.sampled_from(later), unique=True, max_size=2))),
                f"<{name}!{number}>" if draw(st.booleans()) else None,
            )
            for number in range(1, draw(st.sampled_from((0, 0, 1, 2))) + 1 if later else 1)
        )

    entry_routers = routers("start", names_by_layer[0])
    messages: list[str] = []  # ids of those present before the layer
    chosen = {name for router in entry_routers for name in router.chooses}
    running: list[str] = []
    for layer, names in enumerate(names_by_layer, start=1):
        later = names_by_layer[layer] if layer < len(names_by_layer) else []
        free, may_remove, written, removed = list(PLAIN), True, [], []
        layer_nodes = []
        for name in names:
            after = tuple(draw(st.lists(st.sampled_from(running), unique=True, max_size=2))) if running else ()
            if layer > 1 and not after and name not in chosen:
                after = (draw(st.sampled_from(running)),)
            plain = draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
            free = [key for key in free if key not in plain]
            writes = (*plain, *draw(st.lists(st.sampled_from(KEYS[len(PLAIN) :]), unique=True, max_size=3)))
            removes = None
            if "messages" in writes and messages and may_remove and draw(st.booleans()):
                removes, may_remove = draw(st.sampled_from(messages)), False
                removed.append(removes)
            elif "messages" in writes:
                written.append(name)
            layer_nodes.append(
                Node(
                    name=name,
                    layer=layer,
                    program=draw(programs(name)),
                    reads=tuple(draw(st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=3))),
                    writes=writes,
                    window_entries=draw(st.integers(1, 3)),
                    removes=removes,
                    after=after,
                    routers=routers(name, later),
                )
            )
        messages = [message for message in messages if message not in removed] + written
        chosen = {name for node in layer_nodes for router in node.routers for name in router.chooses}
        nodes += layer_nodes
        running = names
    return Drawing(tuple(nodes), entry_routers)


# -- the matrix, from the drawing -------------------------------------------------------------------------------------


def _ends(items: Iterable[Item], edges: list[Edge]) -> tuple[list[str], list[str]]:
    """The first and the last calls of things done one after the other; adds the edges inside."""
    first: list[str] = []
    last: list[str] = []
    for item in items:
        if item.kind == "gather":
            ends = [_ends((branch,), edges) for branch in item.items]
            item_first, item_last = [x for f, _ in ends for x in f], [x for _, la in ends for x in la]
        elif item.kind == "tool":
            item_first, item_last = _ends(item.items, edges)
        else:
            item_first, item_last = list(item.labels[:1]), list(item.labels[-1:])
            for earlier, later in zip(item.labels, item.labels[1:], strict=False):
                edges += [(earlier, later, "trigger", True), (earlier, later, "data", True)]
        if item_first:
            edges += [(src, dst, "data", False) for src in last for dst in item_first]
            first, last = first or item_first, item_last
    return first, last


def is_coroutine(node: Node) -> bool:
    """Whether its function is one; it then works in a thread."""
    return bool(int(node.name[-1]) % 2)


def _readers(items: Iterable[Item], plain: bool, known: bool = True) -> list[tuple[str, bool]]:
    """The calls that are given what the node has read, each with whether that is known of it exactly.

    `plain`: the node's function is no coroutine, so where it stands is not known in a thread of its own making.
    """
    readers = []
    for item in items:
        if item.kind == "call":
            readers.append((item.labels[0], known))
        elif item.kind == "agent":
            readers += [(label, False) for label in item.labels[:1]]  # it is given a text of the node's making
        else:
            readers += _readers(item.items, plain, known=known and not (plain and item.kind == "gather"))
    return readers


def _either(*groups: Sources) -> Sources:
    merged: Sources = {}
    for group in groups:
        for name, certain in group.items():
            merged[name] = certain or merged.get(name, False)
    return merged


class _Matrix:
    def __init__(self, drawing: Drawing) -> None:
        self.edges: list[Edge] = []
        self.nodes = {node.name: node for node in drawing.nodes}
        self.first: dict[str, list[str]] = {}
        self.last: dict[str, list[str]] = {}
        self.controls: dict[str, list[str]] = {}  # what made a node run: nodes, and answers of routers
        self.reads: dict[str, Sources] = {}
        for node in drawing.nodes:
            self.first[node.name], self.last[node.name] = _ends(node.program, self.edges)
            self.controls[node.name] = list(node.after)
        for router in drawing.entry_routers:
            for name in router.chooses:
                self.controls[name] += [router.label] if router.label else []
        for node in drawing.nodes:
            for router in node.routers:
                for name in router.chooses:
                    self.controls[name].append(router.label or node.name)
        self._run(drawing)

    def _run(self, drawing: Drawing) -> None:
        holders: dict[str, Sources] = {key: {} for key in KEYS}
        window: list[str] = []  # the writer of each entry
        messages: dict[str, str] = {}  # id -> writer
        removers: set[str] = set()
        for layer in sorted({node.layer for node in drawing.nodes}):
            running = sorted((node for node in drawing.nodes if node.layer == layer), key=lambda node: node.name)
            for node in running:
                self.reads[node.name] = _either(*(holders[key] for key in node.reads))
                self._node(node)
            for node in running:
                for router in node.routers:
                    if router.label:
                        self._router(node, router.label, holders)
            for node in running:
                for key in node.writes:
                    if key in PLAIN:
                        holders[key] = {node.name: True}
                    elif key == "log":
                        holders[key] = _either(holders[key], {node.name: True})
                    elif key == "joined":
                        holders[key] = _either(holders[key], {node.name: False})
                    elif key == "newest":
                        # The last of the layer is seen to be all that is left; the others may have had a say.
                        rivals = {other.name: False for other in running if "newest" in other.writes}
                        holders[key] = {**rivals, node.name: True}
                    elif key == "window":
                        window = [*window, *([node.name] * node.window_entries)][-2:]
                    elif node.removes:
                        del messages[node.removes]
                        removers.add(node.name)
                    else:
                        messages[node.name] = node.name
            if any("window" in node.writes for node in running):
                writers = {node.name: False for node in running if "window" in node.writes}
                holders["window"] = {**writers, **dict.fromkeys(window, True)}
            holders["messages"] = {**dict.fromkeys(messages.values(), True), **dict.fromkeys(removers, True)}

    def _node(self, node: Node) -> None:
        for source in self._triggered(node.name):
            self.edges += [(source, dst, "trigger", True) for dst in self.first[node.name]]
        for writer, certain in self.reads[node.name].items():
            for source, made_certain in self._made_of(writer).items():
                self.edges += [
                    (source, dst, "data", certain and made_certain and is_own)
                    for dst, is_own in _readers(node.program, plain=not is_coroutine(node))
                ]

    def _router(self, node: Node, label: str, holders: dict[str, Sources]) -> None:
        self.edges += [
            (source, label, "trigger", True) for source in self.last[node.name] or self._triggered(node.name)
        ]
        given: set[str] = set()
        for key in KEYS:  # all of the state, with what its own node has written
            if key in node.writes:
                given |= {node.name} if key in PLAIN else {node.name, *holders[key]}
            else:
                given |= set(holders[key])
        for writer in given:
            self.edges += [(source, label, "data", False) for source in self._made_of(writer)]

    def _triggered(self, name: str) -> set[str]:
        sources: set[str] = set()
        for control in self.controls[name]:
            if control not in self.nodes:
                sources.add(control)
            else:
                sources |= set(self.last[control]) or self._triggered(control)
        return sources

    def _made_of(self, name: str) -> Sources:
        """The calls that a value written by `name` comes from."""
        if name not in self.nodes:
            return {name: True}
        if self.last[name]:
            return dict.fromkeys(self.last[name], True)
        groups = [self._made_of(control) for control in self.controls[name]]
        for writer, certain in self.reads[name].items():
            groups.append({source: certain and made for source, made in self._made_of(writer).items()})
        return _either(*groups)


def drawn_to_edges(drawing: Drawing) -> set[Edge]:
    """The dependency matrix: each pair and kind once, exact where one way of it is."""
    merged: dict[tuple[str, str, str], bool] = {}
    for src, dst, kind, exact in _Matrix(drawing).edges:
        merged[src, dst, kind] = exact or merged.get((src, dst, kind), False)
    return {(*key, exact) for key, exact in merged.items()}


def drawn_to_labels(drawing: Drawing) -> dict[str, str]:
    """Every call of the drawing -> the name of its agent."""
    names = {}

    def add(items: Iterable[Item], node: str) -> None:
        for item in items:
            for number, label in enumerate(item.labels):
                names[label] = f"{node}/a{number}" if item.kind == "agent" else node
            add(item.items, node)

    def add_routers(routers: tuple[Router, ...], node: str) -> None:
        for number, router in enumerate(routers, start=1):
            if router.label:
                names[router.label] = f"{node}:router" if number == 1 else f"{node}:router_{number}"

    add_routers(drawing.entry_routers, "__start__")
    for node in drawing.nodes:
        add(node.program, node.name)
        add_routers(node.routers, node.name)
    return names


# -- the app ----------------------------------------------------------------------------------------------------------


class _Answers(SaysNext):
    """Answers with its label, and keeps the tokens of its prompt. Meets others first where they run at once."""

    label: str
    witness: Any
    meet: Any = None

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        if self.meet is not None:
            self.meet()
        self.witness.prompts[self.label] = set(TOKEN.findall(str(messages[0].content)))
        self.answers = [AIMessage(self.label)]
        return super()._generate(messages, stop, run_manager)


@dataclass
class Witness:
    """What reached which prompt: call -> the calls whose answers are in its prompt."""

    prompts: dict[str, set[str]] = field(default_factory=dict)
    meets: bool = True  # what runs at once meets, in its models too; False where others answer for these

    def ask(self, label: str, known: str, meet: Callable[[], Any] | None = None) -> str:
        """`known` with the answer."""
        answer = _Answers(label=label, witness=self, meet=meet).invoke(f"{known} ").content
        return f"{known} {answer}"


def _tokens(value: Any) -> str:
    """Each token in a value once, so that texts stay short."""
    return " ".join(sorted(set(TOKEN.findall(str(value)))))


def _do(items: Iterable[Item], known: str, witness: Witness, meet: Callable[[], Any] | None = None) -> str:
    for item in items:
        if item.kind == "call":
            known = witness.ask(item.labels[0], known, meet)
        elif item.kind == "agent":
            known = _agent(item.labels, witness, meet).invoke({"t": known})["t"]
        elif item.kind == "tool":
            known = _tool(item.items, witness, meet).invoke({"text": known})
        else:
            barrier = threading.Barrier(len(item.items), timeout=30)
            meet_all = barrier.wait if witness.meets else None
            with ThreadPoolExecutor(len(item.items)) as pool:
                runs = [
                    pool.submit(copy_context().run, _do, (branch,), known, witness, meet_all) for branch in item.items
                ]
                known = _tokens([run.result() for run in runs])
    return _tokens(known)


def _agent(labels: tuple[str, ...], witness: Witness, meet: Callable[[], Any] | None) -> Any:
    graph = StateGraph(TypedDict("Text", {"t": str}))

    def node(label: str | None, meet: Callable[[], Any] | None) -> Callable[[Any], dict[str, str]]:
        def act(state: Any) -> dict[str, str]:
            known = state["t"]
            if label is None and meet is not None:
                meet()
            return {"t": known if label is None else witness.ask(label, known, meet)}

        return act

    earlier = START
    for number, label in enumerate(labels or (None,)):
        graph.add_node(f"a{number}", node(label, meet if number == 0 else None))
        graph.add_edge(earlier, f"a{number}")
        earlier = f"a{number}"
    return graph.compile()


def _tool(items: tuple[Item, ...], witness: Witness, meet: Callable[[], Any] | None) -> StructuredTool:
    def use(text: str) -> str:
        if meet is not None:
            meet()
        return _do(items, text, witness)

    return StructuredTool.from_function(use, name="use", description="Does things.")


def _newest(earlier: str, later: str) -> str:
    return later


def _join(earlier: str, later: str) -> str:
    return _tokens(f"{earlier} {later}") + "."


def _window(earlier: list[str], later: list[str]) -> list[str]:
    return [*earlier, *later][-2:]


State = TypedDict(
    "State",
    {
        **dict.fromkeys(PLAIN, str),
        "log": Annotated[list[str], operator.add],
        "newest": Annotated[str, _newest],
        "joined": Annotated[str, _join],
        "window": Annotated[list[str], _window],
        "messages": Annotated[list[Any], add_messages],
    },  # type: ignore[misc]
    total=False,
)


def _write(node: Node, known: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in node.writes:
        text = f"{node.name} wrote {key}: {known}"
        if key == "messages":
            values[key] = RemoveMessage(node.removes) if node.removes else AIMessage(text, id=node.name)
        elif key == "window":
            values[key] = [f"{text} ({number})" for number in range(node.window_entries)]
        else:
            values[key] = [text] if key == "log" else text
    return values


def drawing_to_graph(drawing: Drawing, witness: Witness) -> Any:
    graph = StateGraph(State)

    def body(node: Node) -> Any:
        # The state is read by code that names the keys, as an app's does.
        seen = ", ".join(f"state.get({key!r})" for key in node.reads)

        def act(seen: list[Any]) -> dict[str, Any]:
            return _write(node, _do(node.program, _tokens(seen), witness))

        source = f"def node(state):\n    return act([{seen}])\n"
        if is_coroutine(node):
            source = f"async def node(state):\n    await sleep(0)\n    return await to_thread(act, [{seen}])\n"
        return source_to_function(source, act=act, sleep=asyncio.sleep, to_thread=asyncio.to_thread)

    def add_routers(routers: tuple[Router, ...], node: str) -> None:
        for number, router in enumerate(routers):

            def route(state: Any, router: Router = router) -> list[str]:
                if router.label:
                    witness.ask(router.label, _tokens(state))
                return list(router.chooses)

            route.__name__ = f"route_{number}"
            graph.add_conditional_edges(node, route, list(router.chooses) or None)

    for node in drawing.nodes:
        graph.add_node(node.name, body(node))
    for node in drawing.nodes:
        for earlier in node.after or ((START,) if node.layer == 1 else ()):
            graph.add_edge(earlier, node.name)
        add_routers(node.routers, node.name)
    add_routers(drawing.entry_routers, START)
    return graph.compile()
