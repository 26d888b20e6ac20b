"""LangGraph's checkpoint namespaces and agent-name metadata -> who acts in a task, by name.

An agent that declares a name (`create_agent(name=...)`, `deepagents`, metadata `lc_agent_name`) is called by it
wherever it runs, and so is its LLM node; what else it runs is `name/node`. Any other node is called by its LangGraph
path. Invariant: LangGraph hands the name down to every graph inside the agent; it counts only where it is declared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from marft_bridge.common.node_names import namespace_to_node

AGENT_NAME_METADATA = "lc_agent_name"
# The LLM nodes of the agents that langchain and langgraph.prebuilt make.
_LLM_NODES = ("model", "agent")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts in a node."""

    path: str  # of nodes, from the innermost graph that declares a name, else from the outermost graph
    declared_name: str | None = None  # in force in the node, declared by its graph or handed down to it

    @property
    def agent(self) -> str:
        """The agent's name, by which it is trained."""
        name = self.declared_name
        if name is None:
            return self.path
        return name if self.path in [f"{name}/{node}" for node in _LLM_NODES] else self.path


@functools.lru_cache(maxsize=4096)
def node_to_actor(node: str, declared_name: str | None, outer: Actor | None) -> Actor:
    """Who acts in a node; `outer` acts in the node around its graph, None for the outermost graph."""
    handed_down = outer.declared_name if outer is not None else None
    if declared_name is not None and declared_name != handed_down:
        return Actor(f"{declared_name}/{node}", declared_name)
    return Actor(f"{outer.path}/{node}" if outer is not None else node, handed_down)


class Actors:
    """Who acts in each task of one run, by checkpoint namespace: what the recorder noted, for everyone who asks."""

    def __init__(self) -> None:
        self._actors: dict[str, Actor] = {}
        self._agents: dict[str, str] = {}  # their names

    def note(self, checkpoint_ns: str, metadata: Mapping[str, Any] | None) -> str:
        """Notes a task that starts with this metadata, after those around it. Returns the name of its agent."""
        self._actors[checkpoint_ns] = actor = namespace_to_actor(checkpoint_ns, metadata, self._actors.get)
        self._agents[checkpoint_ns] = agent = actor.agent
        return agent

    def agent_at(self, checkpoint_ns: str) -> str:
        """The agent of a task; the path of its node where it was not noted, "" outside any node."""
        agent = self._agents.get(checkpoint_ns)
        return namespace_to_node(checkpoint_ns) if agent is None else agent


def namespace_to_actor(
    checkpoint_ns: str, metadata: Mapping[str, Any] | None, known_actor: Callable[[str], Actor | None]
) -> Actor:
    """Who acts in a task, from its metadata and from who acts in the task around it."""
    outer_ns, _, task = checkpoint_ns.rpartition("|")
    while outer_ns and outer_ns.rpartition("|")[2].isdecimal():  # the count of a graph among those that one node runs
        outer_ns = outer_ns.rpartition("|")[0]
    outer = (known_actor(outer_ns) or Actor(namespace_to_node(outer_ns))) if outer_ns else None
    return node_to_actor(namespace_to_node(task), metadata_to_name(metadata), outer)


def metadata_to_name(metadata: Mapping[str, Any] | None) -> str | None:
    """The agent name that metadata of a run or a graph declares."""
    name = (metadata or {}).get(AGENT_NAME_METADATA)
    return name if isinstance(name, str) and name else None
