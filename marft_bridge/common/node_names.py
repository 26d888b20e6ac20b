"""LangGraph's checkpoint namespaces -> names of nodes, the same wherever spans come from."""

from __future__ import annotations

import re

# The count of a graph that was run as if it were the outermost one. LangGraph's own counts begin with no zero.
_APART = re.compile(r"^(?:.*\|)?0\d+(?=\||$)")


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


def graph_run_apart(task_ns: str, number: int) -> str:
    """The namespace of a graph that a task runs with a `configurable` of its own: the `number`-th of its run, from 1.

    The task's namespace is not in such a config (`graph.invoke(x, {"configurable": {"thread_id": "t"}})`), so that
    LangGraph names what runs inside as in an outermost graph. See `namespace_in_task`.
    """
    return f"{task_ns}|0{number}"


def lacks_task_id(checkpoint_ns: str) -> bool:
    """Whether LangGraph may have left task ids out of a namespace, as it does for a graph that keeps its own state."""
    return checkpoint_ns.count(":") <= checkpoint_ns.count("|")


def namespace_in_task(checkpoint_ns: str, task_ns: str) -> str:
    """LangGraph's namespace of a task in a graph which the task with our namespace `task_ns` runs -> ours.

    A graph that keeps its own state (`compile(checkpointer=True)`) is named without the ids of the tasks around it, so
    that every run of it has one name: `outer|inner:<id>` becomes `outer:<id>|inner:<id>`. Any other stays as it is, and
    so does one that does not lie in that task. What runs in a graph of `graph_run_apart` is named below that.
    """
    if not task_ns or not checkpoint_ns or checkpoint_ns == task_ns or checkpoint_ns.startswith(f"{task_ns}|"):
        return checkpoint_ns
    if "|0" in task_ns and (apart := _APART.match(task_ns)) is not None:
        graph_ns, task_in_graph = apart[0], task_ns[apart.end() + 1 :]
        if checkpoint_ns.startswith(f"{graph_ns}|"):
            return checkpoint_ns
        return f"{graph_ns}|{namespace_in_task(checkpoint_ns, task_in_graph)}"
    parts = checkpoint_ns.split("|")
    position = 0
    for own_part in filter(_is_task, task_ns.split("|")):
        while position < len(parts) and not _is_task(parts[position]):
            position += 1
        if position == len(parts) or not f"{own_part}:".startswith(f"{parts[position]}:"):
            return checkpoint_ns
        position += 1
    return "|".join([task_ns, *parts[position:]])


def _is_task(part: str) -> bool:
    return bool(part) and not part.isdecimal()


def _part_to_name(part: str) -> str:
    node, _, task = part.partition(":")
    _, _, router = task.partition(":")
    return f"{node}:{router}" if router else node
