"""A report, a candidate and a condition -> whether it may go out: the gate, the weights, the safety suite.

In this order, each only where the one before it holds; what each found is said. Invariant: a suite that is declared
has passed, or the answer is no. Nothing is signed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from marft_bridge.adapter_files import check_weights
from marft_bridge.bases import config_to_bases
from marft_bridge.comparison.gate import EXIT_CODES, Decision, Gate, decide, default_gate, find_candidate
from marft_bridge.comparison.manifest import FOLDER, PromotedAdapter
from marft_bridge.comparison.records import Report, Variant
from marft_bridge.comparison.safety import (
    SafetyCase,
    SafetyEnd,
    command_environment,
    load_suite,
    run_command,
    run_function,
)
from marft_bridge.comparison.variants import AFTER
from marft_bridge.config import BridgeConfig
from marft_bridge.engine import server_options
from marft_bridge.errors import ConfigError
from marft_bridge.progress import Reporter
from marft_bridge.rewards.contract import Place, RunView
from marft_bridge.run_folder import RunFolder
from marft_bridge.run_store import store_up_to_date
from marft_bridge.served_models import ServedModels
from trace_store.store import TraceStore

REFUSED = EXIT_CODES["refused"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What the gate and, where that was open, the safety suite said."""

    decision: Decision
    ends: tuple[SafetyEnd, ...] = ()
    adapters: dict[str, PromotedAdapter] = field(default_factory=dict)
    base_sha256: str = ""  # of the base model's weights

    @property
    def exit_code(self) -> int:
        """0 where all of it holds, 3 refused, 4 not settled."""
        return self.decision.exit_code or (0 if all(end.passed for end in self.ends) else REFUSED)

    @property
    def output(self) -> bytes:
        """What the suites printed."""
        return b"".join(end.output for end in self.ends)


def check(
    config: BridgeConfig, report: Report, gate: Gate | str | None, candidate: str | None, reporter: Reporter
) -> Checked:
    """The gate; where that is open the weights, and the safety suite. Says what each found, and signs nothing.

    Raises:
        BridgeError, StoreError: the expression, the candidate or the suite is not one, or weights changed.
    """
    folder = RunFolder(config.run_folder)
    variant = find_candidate(report, candidate)
    suite = None if config.promote.safety is None else load_suite(config.promote.safety)
    decision = decide(report, gate or config.promote.gate or default_gate(report), variant.name)
    for line in decision.lines():
        reporter.say(line)
    if decision.exit_code:
        return Checked(decision)
    _refuse_what_cannot_be_promoted(config, variant)
    models = ServedModels(config, config_to_bases(config, reporter.say), folder.adapters)
    adapters = _signed_weights(models, variant)
    ends: list[SafetyEnd] = []
    runs = _runs(folder, report, variant, adapters, reporter)
    case = SafetyCase(variant.name, dict(variant.adapters), runs)
    timeout_s = config.promote.safety_timeout_s
    if suite is not None:
        ends.append(run_function(config.promote.safety or "", suite, case, timeout_s))
    if config.promote.safety_command and all(end.passed for end in ends):
        with _served_candidate(config, folder, models, case, reporter) as environment:
            ends.append(run_command(config.promote.safety_command, environment, timeout_s))
    for end in ends:
        reporter.say(f"safety suite {end.suite}: {'passed' if end.passed else 'FAILED'} ({end.why})")
    checked = Checked(decision, tuple(ends), adapters, models.lineage["base"])
    if checked.exit_code and checked.output:
        reporter.say(f"it printed: {keep_output(folder, 'refused', checked.output)}")
    return checked


def require_candidate(config: BridgeConfig, candidate: str | None) -> None:
    """Refuses, before anything runs, a gate that could not tell which of several candidates is meant."""
    names = [variant.name for variant in config.compare.variants[1:]] or [AFTER]
    if (candidate is None and len(names) > 1) or (candidate is not None and candidate not in names):
        raise ConfigError(f"compare --promote-if: name the candidate with --candidate; one of: {', '.join(names)}")


def keep_output(folder: RunFolder, name: str, output: bytes) -> Path:
    """Writes what a suite printed to `promoted/<name>.safety.txt`, 0600."""
    place = folder.path / FOLDER
    place.mkdir(mode=0o700, exist_ok=True)
    kept = place / f"{name}.safety.txt"
    kept.touch(mode=0o600)
    kept.write_bytes(output)
    return kept


def _refuse_what_cannot_be_promoted(config: BridgeConfig, variant: Variant) -> None:
    if variant.model is not None or variant.graph is not None:
        other = f"model {variant.model}" if variant.model is not None else f"graph {variant.graph}"
        raise ConfigError(
            f"promote: {variant.name!r} runs another {other}; adapter versions of this configuration are promoted: "
            "make it this configuration's, and compare again"
        )
    if strange := sorted(variant.adapters.keys() - {*config.graph.nodes, *config.graph.frozen}):
        raise ConfigError(f"promote: {variant.name!r} has an adapter of {strange[0]!r}, which is not in graph.nodes")


def _signed_weights(models: ServedModels, variant: Variant) -> dict[str, PromotedAdapter]:
    """The candidate's versions with their hashes, once their files are those that were registered."""
    signed = {}
    for node, version in sorted(variant.adapters.items()):
        row = models.registry.get(node, version)
        check_weights(Path(row.path), row.sha256)
        other = row.base_sha256 if row.base_sha256 != models.lineage["base"] else None
        signed[node] = PromotedAdapter(version=version, sha256=row.sha256, base_sha256=other)
    return signed


# -- the safety suite -----------------------------------------------------------------------------------------


def _runs(
    folder: RunFolder,
    report: Report,
    variant: Variant,
    adapters: Mapping[str, PromotedAdapter],
    reporter: Reporter,
) -> list[RunView]:
    """The candidate's recorded runs in the comparison that the report is of: the last that began before it was made."""
    with store_up_to_date(folder, reporter) as store:
        _refuse_other_weights(store, adapters)
        made_ns = report.created.timestamp() * 1e9
        ids = [run.run_id for run in store.runs() if run.command == "compare" and run.started_ns <= made_ns]
        found = list(store.trajectories(run_ids=ids[-1:] or [""], variant=variant.name))
        place = Place(folder.path)
        views = [
            RunView(t.episode.task, None, t, store.spans(t.episode.episode_id), rescoring=True, place=place)
            for t in found
        ]
    if not views or any(t.episode.adapters != dict(variant.adapters) for t in found):
        raise ConfigError(
            f"promote: the store of {folder.path} does not hold the runs of {variant.name!r} that report.json is of; "
            "run `marft-bridge compare` again"
        )
    return views


def _refuse_other_weights(store: TraceStore, adapters: Mapping[str, PromotedAdapter]) -> None:
    """The store noted the hash when a version was published, apart from the record that lies beside the weights."""
    for row in store.adapters():
        signed = adapters.get(row.node)
        if signed is not None and row.version == signed.version and row.sha256 != signed.sha256:
            raise ConfigError(
                f"promote: {row.node}@{row.version} is not what was trained: its files and their record were exchanged"
            )


@contextmanager
def _served_candidate(
    config: BridgeConfig, folder: RunFolder, models: ServedModels, case: SafetyCase, reporter: Reporter
) -> Iterator[dict[str, str]]:
    """The candidate's versions, served until the block ends; gives the environment that tells where."""
    versions = {**dict.fromkeys(config.graph.frozen, 0), **case.adapters}
    options = server_options(models.bases, folder, reporter)
    with asyncio.Runner() as loop, models.served(options, folder.server_log_of, loop, reporter):
        models.register_null(versions)
        models.publish(versions)
        places = {node: models.place_of(node, version) for node, version in versions.items()}
        yield command_environment(case, models.place, places)
