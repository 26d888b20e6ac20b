"""`train.start_from`, another run's folder -> the adapter that each node begins from.

Invariants: an adapter begins a run of its own base model, rank, alpha and modules only; no held-out task of the run
that begins was learned from by the other one, and what that one learned from can be held out no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import BridgeError, ConfigError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.held_out import heldout_leaks, take_over_learned_tasks
from marft_bridge.runs.named_version import choose_version, read_named_version
from marft_bridge.runs.run_folder import TRAIN, RunFolder
from marft_bridge.serving.adapter_checks import CONFIG_FILE, check_files
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.records import AdapterRow
from trace_store.store import TraceStore
from trainers.config import AgentOptions, LoraOptions

OPTION = "train.start_from"


def config_to_start(config: BridgeConfig, registry: AdapterRegistry) -> dict[str, AdapterRow]:
    """Node -> the version that it begins from: that which the other run's training names, else its newest.

    Nodes that the other run did not train are left out; without the option, all are.

    Args:
        registry: of the run that begins.

    Raises:
        ConfigError: the folder is no other run's, it trained none of these nodes, or an adapter does not fit.
    """
    if config.train.start_from is None:
        return {}
    first_run = RunFolder(Path(config.train.start_from))
    if first_run.path.resolve() == Path(config.run_folder).resolve():
        raise ConfigError(f"{OPTION}: {first_run.path} is the folder of this run; name another one, or leave it out")
    if not first_run.store.exists():
        raise ConfigError(f"{OPTION}: {first_run.path} holds no run; name the folder of one that `train` has trained")
    nodes, named_version = config.graph.nodes, read_named_version(first_run)
    start_adapters = AdapterRegistry(
        first_run.adapters, registry.base_of(""), {node: registry.base_of(node) for node in nodes}
    )
    rows: dict[str, AdapterRow] = {}
    for node in nodes:
        version = choose_version(named_version, [version for version in start_adapters.versions(node) if version > 0])
        if version is None:
            continue
        try:
            rows[node] = start_adapters.get(node, version)
            check_files(Path(rows[node].path), start_adapters.hashes(node, version))
        except BridgeError as error:
            raise ConfigError(f"{OPTION}: {error}") from None
        _refuse_other_shape(rows[node], config.train.trainer.lora)
    if not rows:
        raise ConfigError(f"{OPTION}: {first_run.path} has trained none of the nodes {', '.join(nodes)}")
    _refuse_two_for_one(rows, config.train.trainer.agents)
    return rows


def _refuse_other_shape(row: AdapterRow, lora: LoraOptions) -> None:
    file = Path(row.path) / CONFIG_FILE
    shape: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for option, adapters, needed in (
        ("rank", shape.get("r"), lora.rank),
        ("alpha", shape.get("lora_alpha"), lora.alpha),
        ("target_modules", sorted(shape.get("target_modules") or ()), sorted(lora.target_modules)),
    ):
        if adapters != needed:
            raise ConfigError(
                f"{OPTION}: {row.node}@{row.version} has {option} {adapters!r}, and train.trainer.lora.{option} is "
                f"{needed!r}; set it to that of the adapter"
            )


def _refuse_two_for_one(rows: Mapping[str, AdapterRow], agents: Mapping[str, AgentOptions]) -> None:
    first_of: dict[str, AdapterRow] = {}
    for node, row in rows.items():
        name = agents.get(node, AgentOptions()).adapter or node
        first = first_of.setdefault(name, row)
        if first.sha256 != row.sha256:
            raise ConfigError(
                f"{OPTION}: {first.node!r} and {node!r} share the adapter {name!r} here, and had different ones there; "
                "give each an adapter of its own"
            )


def refuse_learned_tasks(config: BridgeConfig, heldout_tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Refuses held-out tasks that the other run learned from, and notes what it did learn from in the own folder.

    Returns:
        The digests of what the other run learned from, see `take_over_learned_tasks`.

    Raises:
        ConfigError: there is such a task.
    """
    assert config.train.start_from is not None
    first_run = RunFolder(Path(config.train.start_from))
    with open_for_reading(first_run.store) as store:
        if leaked := heldout_leaks(store, heldout_tasks):
            raise ConfigError(
                f"{OPTION}: {first_run.path} learned from {len(leaked)} of the held-out tasks, such as {leaked[0]!r}; "
                "hold out the same tasks in both runs (graph.tasks, graph.heldout)"
            )
        return take_over_learned_tasks(store, RunFolder(config.run_folder).path)


def refuse_other_start(config: BridgeConfig, store: TraceStore) -> None:
    """Refuses to resume a run that began from something else.

    Raises:
        ConfigError: it did.
    """
    for run in store.runs():
        began_from = run.config.get("train", {}).get("start_from")
        if run.run_id == TRAIN and began_from != config.train.start_from:
            raise ConfigError(
                f"{OPTION}: this run began from {began_from or 'its base model'}, which a resumed one cannot change; "
                "set it back, or choose another --run folder"
            )


def start_to_text(rows: Mapping[str, AdapterRow], config: BridgeConfig) -> str:
    """One line: what begins from where."""
    begun = ", ".join(f"{node}@{row.version}" for node, row in rows.items())
    rest = [node for node in config.graph.nodes if node not in rows]
    from_base = f"; from the base model: {', '.join(rest)}" if rest else ""
    return f"version 1 goes on from {begun} of {config.train.start_from}{from_base}"
