"""LangGraph's checkpoint namespaces -> names of nodes, the same wherever spans come from."""

from __future__ import annotations


def namespace_to_node(checkpoint_ns: str) -> str:
    """`outer:<id>|inner:<id>` becomes `outer/inner`, and a router's `writer:<id>:router` becomes `writer:router`.

    A node that runs several subgraphs has a bare count between its part and theirs (`outer:<id>|1|inner:<id>`),
    which says nothing about which node it is. See `running_routers` for routers.
    """
    if "|" not in checkpoint_ns:  # a node of the outermost graph
        return _part_to_name(checkpoint_ns) if _is_task(checkpoint_ns) else ""
    return "/".join(map(_part_to_name, filter(_is_task, checkpoint_ns.split("|"))))


def enclosing_task(graph_ns: str) -> str:
    """The namespace of a graph instance -> that of the task which runs it: without the count of a later subgraph."""
    outer, _, count = graph_ns.rpartition("|")
    return outer if count.isdecimal() else graph_ns


def _is_task(part: str) -> bool:
    return bool(part) and not part.isdecimal()


def _part_to_name(part: str) -> str:
    node, _, task = part.partition(":")
    _, _, router = task.partition(":")
    return f"{node}:{router}" if router else node
