"""`marft-bridge export`: a version of a node in a run folder -> a folder that other tools load.

Without `--merged` it is a plain peft adapter, with it a whole model directory; a model card is in both, and `--push`
sends them to the Hub. Invariants: what is exported are the files that were registered, byte for byte before merging;
no path of this machine leaves it; the run folder is only read; nothing is sent without `--push`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from marft_bridge.commands.hub_push import Destination
from marft_bridge.commands.model_card import CardSubject, read_report, write_card
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import HubName, directory_to_hub_name, text_to_hub_name
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.compare import BEST, NEWEST
from marft_bridge.promotion.manifest import Manifest, newest_manifest, refuse_other_weights
from marft_bridge.runs.named_version import BEST_TEXT, read_named_version
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_checks import check_files
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.base_models import PREPARED_MODEL, config_to_bases, directory_of
from trace_store.records import AdapterRow
from trainers.common.files import weights_to_sha256

PROMOTED = "promoted"


@dataclass(frozen=True, slots=True)
class ExportFlags:
    """How a node is exported."""

    version: str | None = None  # a number, `best`, `newest` or `promoted`; None: the best, else the newest
    merged: bool = False  # add the adapter to the base model and write the whole model
    base_model: str | None = None  # what the export calls its base model; None: its Hub name, or a relative path
    license: str | None = None  # of the card; None: it names none
    push: str | None = None  # a repository of the Hub, owner/name
    public: bool = False  # whether a repository that is made for it is one for everybody


def export_node(config: BridgeConfig, node: str, out: Path, flags: ExportFlags, reporter: Reporter) -> None:
    """Writes a node's adapter into the folder `out`, which must not exist or be empty.

    Raises:
        ConfigError: no such run folder or node, a node without a trained adapter, or what `Destination` raises.
        ServingError: no such version, or its files are not those that were registered, or signed off.
        TrainError: the adapter does not belong to the base model, or `out` is not empty.
    """
    folder = RunFolder(config.run_folder)
    if not folder.path.is_dir():
        raise ConfigError(f"export: there is no run folder {folder.path}; `marft-bridge train` makes one")
    folder.refuse_unsafe()
    if node not in config.graph.nodes:
        raise ConfigError(f"export: {node!r} is not among graph.nodes: {', '.join(config.graph.nodes)}")
    if flags.public and flags.push is None:
        raise ConfigError("export: --public has no effect without --push")
    destination = None if flags.push is None else Destination.checked(flags.push, flags.public)
    model_dir = directory_of(config_to_bases(config, reporter.say), node)
    base_sha256 = weights_to_sha256(model_dir)
    promotion = newest_manifest(folder.path, config.promote.key_env) if flags.version == PROMOTED else None
    version = BEST if flags.version is None else flags.version
    number, choice = _text_to_number(version, node, folder, promotion=promotion)
    row = _registered_adapter(AdapterRegistry(folder.adapters, base_sha256), node, number, folder=folder)
    if promotion is not None:
        refuse_other_weights(promotion, node, row)
    from trainers.adapters.adapter_files import folder_to_rank
    from trainers.export import export_adapter, export_merged  # torch

    base_name, base_on_hub = _name_base(config, node, model_dir, given_name=flags.base_model)
    report = read_report(folder)
    if report is None and (folder.path / "report.json").exists():
        reporter.say(f"{folder.path / 'report.json'} is no report of this version: the card has no comparison")
    subject = CardSubject(
        node=node,
        version=row.version,
        merged=flags.merged,
        base_name=base_name,
        base_on_hub=base_on_hub,
        location=out.resolve().name if destination is None else destination.repository,
        rank=folder_to_rank(Path(row.path)),
        license=flags.license,
    )
    texts = {"README.md": write_card(subject, folder, report)}
    if flags.merged:
        export_merged(model_dir, Path(row.path), out, base_sha256=base_sha256, texts=texts)
    else:
        export_adapter(
            model_dir,
            Path(row.path),
            out,
            base_sha256=base_sha256,
            base_name=base_name,
            revision=None if base_on_hub is None else base_on_hub.revision,
            texts=texts,
        )
    kind = "merged into its base model" if flags.merged else f"as a peft adapter for {base_name}"
    reporter.say(f"exported {node}@{row.version}{choice} {kind}: {out}")
    if destination is not None:
        reporter.say(f"pushed to {destination.push(out, f'{node}@{row.version}')}")
    reporter.give({"node": node, "version": row.version, "folder": str(out), "merged": flags.merged})


def _name_base(config: BridgeConfig, node: str, model_dir: Path, given_name: str | None) -> tuple[str, HubName | None]:
    """What others call the base model, and the same where it is a name of the Hub.

    Raises:
        ConfigError: `--base-model` is a path of this machine.
    """
    if given_name is not None:
        if Path(given_name).is_absolute():
            raise ConfigError(f"export: --base-model {given_name!r} is a path of this machine; give a name of the Hub")
        name = text_to_hub_name(given_name)
        return (given_name, None) if name is None else (name.repository, name)
    name = directory_to_hub_name(model_dir)
    if name is not None:
        return name.repository, name
    paths = [table.path for table in config.models.values() if node in table.nodes]
    path = Path(paths[0] if paths else config.model.path)
    is_known_elsewhere = str(path) != PREPARED_MODEL and not path.is_absolute() and ".." not in path.parts
    return (path.as_posix() if is_known_elsewhere else model_dir.name), None


def _text_to_number(version: str, node: str, folder: RunFolder, promotion: Manifest | None) -> tuple[int | None, str]:
    """The version's number, None for the newest, and who chose it, to be said behind it."""
    if version.isascii() and version.isdecimal():
        return int(version), ""
    if version == NEWEST:
        return None, ""
    if version == BEST:
        named = read_named_version(folder)
        return (None, "") if named is None else (named.version, f" ({BEST_TEXT})")
    if version != PROMOTED:
        raise ConfigError(f"export: --version {version!r} is neither a number nor one of: best, newest, promoted")
    if promotion is None or node not in promotion.versions:
        raise ConfigError(f"export: no version of {node!r} was promoted in {folder.path}; run `marft-bridge promote`")
    return promotion.versions[node], ""


def _registered_adapter(registry: AdapterRegistry, node: str, version: int | None, folder: RunFolder) -> AdapterRow:
    row = registry.latest(node) if version is None else registry.get(node, version)
    if row is None or row.version == 0:
        raise ConfigError(
            f"export: {node!r} has no trained adapter in {folder.path}"
            if version is None
            else f"export: version 0 of {node!r} changes nothing; use the base model itself"
        )
    check_files(Path(row.path), registry.hashes(node, row.version))
    return row
