"""LangGraph's checkpoint namespaces -> names of nodes, the same wherever spans come from."""

from __future__ import annotations


def namespace_to_node(checkpoint_ns: str) -> str:
    """`outer:<id>|inner:<id>` becomes `outer/inner`.

    A node that runs several subgraphs has a bare count between its part and theirs (`outer:<id>|1|inner:<id>`),
    which says nothing about which node it is.
    """
    return "/".join(part.partition(":")[0] for part in checkpoint_ns.split("|") if part and not part.isdecimal())
