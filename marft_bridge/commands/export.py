"""`marft-bridge export`: a version of a node in a run folder -> a folder that other tools load.

Without `--merged` it is a plain peft adapter, with it a whole model directory. Invariants: the exported weights are
those that were registered, byte for byte before merging; the run folder is only read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.compare import BEST, NEWEST
from marft_bridge.promotion.manifest import promoted_versions
from marft_bridge.runs.named_version import BEST_TEXT, read_named_version
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.base_models import config_to_bases, directory_of
from trace_store.records import AdapterRow
from trainers.common.files import weights_to_sha256


def export_node(
    config: BridgeConfig, node: str, out: Path, version: str | None, merged: bool, reporter: Reporter
) -> None:
    """Writes a node's adapter into the folder `out`, which must not exist or be empty.

    Args:
        version: a number, `best`, `newest` or `promoted`; None takes the best, which is the newest where training named
            none.
        merged: whether to add the adapter to the base model and write the whole model.

    Raises:
        ConfigError: no such run folder or node, or a node without a trained adapter.
        ServingError: no such version, or its weights are not those that were registered.
        TrainError: the adapter does not belong to the base model, or `out` is not empty.
    """
    folder = RunFolder(config.run_folder)
    if not folder.path.is_dir():
        raise ConfigError(f"export: there is no run folder {folder.path}; `marft-bridge train` makes one")
    folder.refuse_unsafe()
    if node not in config.graph.nodes:
        raise ConfigError(f"export: {node!r} is not among graph.nodes: {', '.join(config.graph.nodes)}")
    model_dir = directory_of(config_to_bases(config, reporter.say), node)
    base_sha256 = weights_to_sha256(model_dir)
    number, choice = _text_to_number(BEST if version is None else version, node, folder)
    row = _registered_adapter(AdapterRegistry(folder.adapters, base_sha256), node, number, folder=folder)
    from trainers.export import export_adapter, export_merged  # torch

    write = export_merged if merged else export_adapter
    write(model_dir, Path(row.path), out, base_sha256=base_sha256)
    kind = "merged into its base model" if merged else f"as a peft adapter for {model_dir}"
    reporter.say(f"exported {node}@{row.version}{choice} {kind}: {out}")
    reporter.give({"node": node, "version": row.version, "folder": str(out), "merged": merged})


def _text_to_number(version: str, node: str, folder: RunFolder) -> tuple[int | None, str]:
    """The version's number, None for the newest, and who chose it, to be said behind it."""
    if version.isascii() and version.isdecimal():
        return int(version), ""
    if version == NEWEST:
        return None, ""
    if version == BEST:
        named = read_named_version(folder)
        return (None, "") if named is None else (named.version, f" ({BEST_TEXT})")
    if version != "promoted":
        raise ConfigError(f"export: --version {version!r} is neither a number nor one of: best, newest, promoted")
    promoted = promoted_versions(folder.path)
    if promoted is None or node not in promoted:
        raise ConfigError(f"export: no version of {node!r} was promoted in {folder.path}; run `marft-bridge promote`")
    return promoted[node], ""


def _registered_adapter(registry: AdapterRegistry, node: str, version: int | None, folder: RunFolder) -> AdapterRow:
    row = registry.latest(node) if version is None else registry.get(node, version)
    if row is None or row.version == 0:
        raise ConfigError(
            f"export: {node!r} has no trained adapter in {folder.path}"
            if version is None
            else f"export: version 0 of {node!r} changes nothing; use the base model itself"
        )
    with (Path(row.path) / "adapter_model.safetensors").open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != row.sha256:
            raise ServingError(
                f"the weights of adapter v{row.version} of node {node!r} changed after it was registered"
            )
    return row
