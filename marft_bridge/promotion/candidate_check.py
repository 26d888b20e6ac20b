"""A report, a gate and a candidate -> whether the candidate may be promoted: by gate, weights and safety suite.

They are checked in this order, each only after the one before it has passed, and every result is printed. Invariant: a
declared safety suite has passed, or the candidate is refused. Nothing is signed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.files import write_atomically
from marft_bridge.common.hub_names import model_to_pinned
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.records import Report, Variant
from marft_bridge.comparison.variants import AFTER_VARIANT
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.gate_expression import Gate
from marft_bridge.promotion.efficient import CLAUSE, efficient_to_finding, find_efficient
from marft_bridge.promotion.gate import EXIT_CODES, Decision, decide, default_gate, find_candidate, lost_findings
from marft_bridge.promotion.manifest import FOLDER, PromotedAdapter
from marft_bridge.promotion.safety import (
    SafetyCase,
    SuiteOutcome,
    command_environment,
    load_suite,
    run_command,
    run_function,
)
from marft_bridge.rewards.contract import RewardEnvironment, RunView
from marft_bridge.runs.device_lines import announced_devices
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.runs.run_store import open_run_store
from marft_bridge.serving.adapter_checks import CONFIG_FILE, check_files, folder_to_hashes
from marft_bridge.serving.model_versions import ModelVersions, config_to_versions
from marft_bridge.serving.served_bases import serve_bases
from marft_bridge.serving.server_file import server_options
from trace_store.files import make_folder
from trace_store.store import TraceStore

REFUSED = EXIT_CODES["refused"]


@dataclass(frozen=True, slots=True)
class CandidateCheck:
    """The decision of the gate and, where that has passed, the outcomes of the safety suites."""

    decision: Decision
    outcomes: tuple[SuiteOutcome, ...] = ()
    adapters: dict[str, PromotedAdapter] = field(default_factory=dict)
    hosted: tuple[str, ...] = ()  # nodes that call the models that the app was written with
    base_sha256: str = ""  # of the base model's weights

    @property
    def exit_code(self) -> int:
        """0 where the gate and every suite passed, 3 refused, 4 not settled."""
        return self.decision.exit_code or (0 if all(outcome.passed for outcome in self.outcomes) else REFUSED)

    def to_json(self) -> dict[str, Any]:
        """The decision and the outcomes of the suites, for `--json`."""
        decision = {**asdict(self.decision), "outcome": self.decision.outcome}
        suites = [
            {"suite": suite.suite, "passed": suite.passed, "reason": suite.reason, "seconds": suite.seconds}
            for suite in self.outcomes
        ]
        return {"gate": decision, "safety": suites}

    @property
    def output(self) -> bytes:
        """The output of all suites."""
        return b"".join(outcome.output for outcome in self.outcomes)


def check_candidate(
    config: BridgeConfig,
    report: Report,
    gate: Gate | str | None,
    candidate: str | None,
    reporter: Reporter,
    *,
    is_efficient: bool = False,
) -> CandidateCheck:
    """Checks the gate and, where it passes, the weights and the safety suite; prints each result, and signs nothing.

    Args:
        gate: None takes `promote.gate`, or else that the deciding metric is better.
        candidate: the name of a variant; None takes the only one.
        is_efficient: the candidate is to be an efficient team of the report, shown non-inferior; None as candidate
            takes the cheapest, and without a gate that is all that is asked.

    Raises:
        BridgeError, StoreError: the expression, the candidate or the suite is invalid, weights changed, or the report
            is not of the configuration as it is.
    """
    folder = RunFolder(config.run_folder)
    _refuse_other_configuration(config, report)
    variant = find_efficient(report, candidate) if is_efficient else find_candidate(report, candidate)
    safety_function = None if config.promote.safety is None else load_suite(config.promote.safety)
    decision = _decide(report, variant, gate or config.promote.gate, is_efficient=is_efficient)
    for line in decision.lines():
        reporter.say(line)
    if decision.exit_code:
        return CandidateCheck(decision)
    _refuse_other_setup(config, variant)
    if variant.hosted:
        for line in _node_lines(config, variant):
            reporter.say(line)
    versions = config_to_versions(config, folder.adapters, reporter.say)
    adapters = _signed_weights(versions, variant)
    outcomes: list[SuiteOutcome] = []
    runs = _read_candidate_runs(folder, report, variant, adapters=adapters, reporter=reporter)
    case = SafetyCase(variant.name, dict(variant.adapters), runs)
    timeout_s = config.promote.safety_timeout_s
    if safety_function is not None:
        outcomes.append(run_function(config.promote.safety or "", safety_function, case, timeout_s=timeout_s))
    if config.promote.safety_command and all(outcome.passed for outcome in outcomes):
        with _served_candidate(config, folder, versions, case=case, reporter=reporter) as environment:
            outcomes.append(run_command(config.promote.safety_command, environment, timeout_s))
    for outcome in outcomes:
        reporter.say(f"safety suite {outcome.suite}: {'passed' if outcome.passed else 'FAILED'} ({outcome.reason})")
    result = CandidateCheck(
        decision, tuple(outcomes), adapters, hosted=variant.hosted, base_sha256=versions.lineage["base"]
    )
    if result.exit_code and result.output:
        reporter.say(f"it printed: {write_output(folder, 'refused', result.output)}")
    return result


def _decide(report: Report, variant: Variant, gate: Gate | str | None, *, is_efficient: bool) -> Decision:
    if not is_efficient:
        return decide(report, gate or default_gate(report), variant.name)
    finding = efficient_to_finding(report, variant)
    if gate is None:
        return Decision(variant.name, CLAUSE, (finding, *lost_findings(report, variant)))
    decision = decide(report, gate, variant.name)
    return replace(decision, gate=f"{CLAUSE} and {decision.gate}", findings=(finding, *decision.findings))


def _node_lines(config: BridgeConfig, variant: Variant) -> list[str]:
    """Which node runs where, a line each."""
    places = {
        **dict.fromkeys(config.graph.frozen, "local, untrained"),
        **{node: f"local, {node}@{version}" for node, version in variant.adapters.items()},
        **dict.fromkeys(variant.hosted, "hosted, as the app calls it"),
    }
    nodes = dict.fromkeys((*config.graph.nodes, *config.graph.frozen, *variant.hosted))
    return [f"  {node}: {places[node]}" for node in nodes if node in places]


def resolve_candidate(config: BridgeConfig, candidate: str | None) -> str:
    """The candidate, or the only one where none is named; opponents of a tournament are none.

    Raises:
        ConfigError: it is not a variant, or none is named and there are several.
    """
    names = [variant.name for variant in config.compare.variants[1:]] or [AFTER_VARIANT]
    if (candidate is None and len(names) > 1) or (candidate is not None and candidate not in names):
        raise ConfigError(f"compare --promote-if: name the candidate with --candidate; one of: {', '.join(names)}")
    return candidate or names[0]


def write_output(folder: RunFolder, name: str, output: bytes) -> Path:
    """Writes the output of a suite to `promoted/<name>.safety.txt`, mode 0600."""
    promoted_folder = folder.path / FOLDER
    make_folder(promoted_folder)
    path = promoted_folder / f"{name}.safety.txt"
    write_atomically(path, output)
    return path


def _refuse_other_configuration(config: BridgeConfig, report: Report) -> None:
    """Refuses a report that was made of another graph or base model than are configured now."""
    now = {"graph.app": config.graph.app, "model.path": model_to_pinned(config.model.path)}
    reported = {"graph.app": report.setup.graph, "model.path": report.setup.model}
    for option, value in now.items():
        if value != reported[option]:
            raise ConfigError(
                f"promote: report.json was made with {option} = {reported[option]!r}, and it is {value!r} now; run "
                "`marft-bridge compare` again"
            )


def _refuse_other_setup(config: BridgeConfig, variant: Variant) -> None:
    """Refuses a variant of another model, graph, prompt or limit, or with an adapter of an unknown node."""
    if variant.model is not None or variant.graph is not None:
        setup = f"model {variant.model}" if variant.model is not None else f"graph {variant.graph}"
        raise ConfigError(
            f"promote: {variant.name!r} runs another {setup}; adapter versions of this configuration are promoted: "
            "make it this configuration's, and compare again"
        )
    if variant.prompts:
        raise ConfigError(
            f"promote: {variant.name!r} has prompts of its own ({', '.join(variant.prompts)}); adapter versions of "
            "this configuration are promoted: put the prompts into the app, and compare again"
        )
    if variant.max_tokens is not None:
        raise ConfigError(
            f"promote: {variant.name!r} has max_tokens {variant.max_tokens} of its own; adapter versions of this "
            "configuration are promoted: set sampling.max_tokens to it, and compare again"
        )
    if unknown_nodes := sorted(variant.adapters.keys() - {*config.graph.nodes, *config.graph.frozen}):
        raise ConfigError(
            f"promote: {variant.name!r} has an adapter of {unknown_nodes[0]!r}, which is not in graph.nodes"
        )


def _signed_weights(versions: ModelVersions, variant: Variant) -> dict[str, PromotedAdapter]:
    """The candidate's versions with their hashes, after checking that their files are those that were registered."""
    adapters = {}
    for node, version in sorted(variant.adapters.items()):
        row = versions.registry.get(node, version)
        folder = Path(row.path)
        check_files(folder, versions.registry.hashes(node, version))
        config_sha256 = folder_to_hashes(folder, [CONFIG_FILE]).get(CONFIG_FILE)
        base_sha256 = row.base_sha256 if row.base_sha256 != versions.lineage["base"] else None
        adapters[node] = PromotedAdapter(
            version=version, sha256=row.sha256, config_sha256=config_sha256, base_sha256=base_sha256
        )
    return adapters


# -- the safety suite -----------------------------------------------------------------------------------------


def _read_candidate_runs(
    folder: RunFolder,
    report: Report,
    variant: Variant,
    adapters: Mapping[str, PromotedAdapter],
    reporter: Reporter,
) -> list[RunView]:
    """The candidate's recorded runs in the report's comparison: the last that started before the report was made."""
    with open_run_store(folder, reporter) as store:
        _refuse_other_weights(store, adapters)
        report_ns = report.created.timestamp() * 1e9
        comparisons = [run for run in store.runs() if run.command == "compare"]
        if newer_ids := [run.run_id for run in comparisons if run.started_ns > report_ns]:
            raise ConfigError(
                f"promote: report.json is older than the comparison {newer_ids[-1]}, which was begun after it; finish "
                "that one by the same command with --resume"
            )
        run_ids = [run.run_id for run in comparisons]
        trajectories = list(store.trajectories(run_ids=run_ids[-1:] or [""], variant=variant.name))
        environment = RewardEnvironment(folder.path)
        views = [
            RunView(
                t.episode.task,
                None,
                t,
                spans=store.spans(t.episode.episode_id),
                rescoring=True,
                environment=environment,
            )
            for t in trajectories
        ]
    if not views or any(t.episode.adapters != dict(variant.adapters) for t in trajectories):
        raise ConfigError(
            f"promote: the store of {folder.path} does not hold the runs of {variant.name!r} that report.json is of; "
            "run `marft-bridge compare` again"
        )
    return views


def _refuse_other_weights(store: TraceStore, adapters: Mapping[str, PromotedAdapter]) -> None:
    """Compares with the hashes that the store noted at publication; those of the registry lie beside the weights."""
    for row in store.adapters():
        adapter = adapters.get(row.node)
        if adapter is not None and row.version == adapter.version and row.sha256 != adapter.sha256:
            raise ConfigError(
                f"promote: {row.node}@{row.version} is not what was trained: its files and their record were exchanged"
            )


@contextmanager
def _served_candidate(
    config: BridgeConfig, folder: RunFolder, model_versions: ModelVersions, case: SafetyCase, reporter: Reporter
) -> Iterator[dict[str, str]]:
    """Serves the candidate's versions until the block ends; yields the environment variables with the addresses."""
    versions = {**dict.fromkeys(config.graph.frozen, 0), **case.adapters}
    options = server_options(model_versions.bases, folder, reporter)
    with (
        asyncio.Runner() as runner,
        serve_bases(
            config,
            model_versions,
            options,
            log_of=folder.server_log_of,
            loop=runner,
            reporter=reporter,
            announce=partial(announced_devices, folder),
        ) as servers,
    ):
        model_versions.register_zero(versions)
        servers.publish(versions)
        addresses = {node: servers.address_of(node, version) for node, version in versions.items()}
        yield command_environment(case, servers.judge, addresses)
