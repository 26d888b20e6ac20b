"""LangGraph's namespaces of error handlers -> ours, in which a handler is an agent beside the node that it serves.

When the node `writer` fails and has an error handler (`add_node(error_handler=...)`, `set_node_defaults`), LangGraph
runs the handler as a task of the same graph, but names it below the failed task: `writer:<id>|__error_handler__...`.
Ours is `writer:<id>:error_handler`, and a graph that the handler runs lies below it. Invariant: a namespace of ours
stays as it is.
"""

from __future__ import annotations

import re

ERROR_HANDLER = ":error_handler"
"""End of our namespace of a handler, after that of the task that failed, and of its agent's name."""

HANDLER_NODE = "_error_handler__"
"""In the name of every node that LangGraph makes for an error handler."""

_HANDLER_TASK = re.compile(r"\|__(?:default_)?error_handler__[^|]*")


def handler_to_own(checkpoint_ns: str) -> str:
    """A namespace with LangGraph's names of error handlers replaced by ours."""
    return _HANDLER_TASK.sub(ERROR_HANDLER, checkpoint_ns) if HANDLER_NODE in checkpoint_ns else checkpoint_ns


def failed_task(ns: str) -> str | None:
    """Our namespace of an error handler's task -> that of the task whose failure it handles; None for another task."""
    return ns.removesuffix(ERROR_HANDLER) if ns.endswith(ERROR_HANDLER) else None
