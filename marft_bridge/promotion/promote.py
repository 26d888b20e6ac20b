"""`marft-bridge promote`: a comparison's report -> a signed manifest of adapter versions, or the reasons for a refusal.

In order: the gate, the weights and the safety suite (`candidate_check`), the confirmation of a person, the manifest.
Invariants: nothing is signed off that was not compared, whose weights changed since, or whose declared safety suite
did not pass; a refusal leaves all manifests as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.records import Report
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.promotion.candidate_check import check_candidate, write_output
from marft_bridge.promotion.manifest import (
    FOLDER,
    Manifest,
    SafetyResult,
    SignedFinding,
    next_chain_position,
    open_chain,
    read_signing_key,
    verify_chain,
    write_manifest,
)
from marft_bridge.promotion.safety import SuiteOutcome
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_checks import check_files
from marft_bridge.serving.model_versions import config_to_versions

Confirm = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class PromotionRequest:
    """The candidate, gate and signer of the command line."""

    candidate: str | None = None  # None: the only one
    gate: str | None = None  # None: promote.gate, or that the deciding metric is better
    signed_by: str | None = None
    is_efficient: bool = False  # the candidate is an efficient team of the report; see `candidate_check`


def promote(config: BridgeConfig, request: PromotionRequest, confirm: Confirm, reporter: Reporter) -> int:
    """Signs off the candidate of the newest report, if gate, weights and safety suite allow it.

    Args:
        confirm: called once, with a line that says what will be signed; False signs nothing.

    Returns:
        The exit code: 0 promoted, 3 refused, 4 not settled.

    Raises:
        BridgeError, StoreError, TrainError: see the messages; nothing was promoted.
    """
    folder = RunFolder(config.run_folder)
    signed_by = _clean_signer(request.signed_by)
    key = read_signing_key(config.promote.key_env)
    report, report_sha256 = read_report(folder)
    with folder.lock_for("promote"):
        open_chain(folder.path, key, reporter.say)
        result = check_candidate(
            config,
            report,
            request.gate,
            candidate=request.candidate,
            reporter=reporter,
            is_efficient=request.is_efficient,
        )
        if result.exit_code:
            outcome = result.decision.outcome if result.decision.exit_code else "refused"
            reporter.give({"outcome": outcome, **result.to_json(), "manifests": []})
            return result.exit_code
        decision = result.decision
        number, previous = next_chain_position(folder.path)
        manifest = Manifest(
            number=number,
            previous_sha256=previous,
            candidate=decision.candidate,
            base=report.base,
            graph=report.setup.graph,
            model=report.setup.model,
            base_sha256=result.base_sha256,
            adapters=result.adapters,
            hosted=result.hosted,
            tool_surface=dict(report.setup.tool_surface),
            tool_surface_differs=report.setup.tool_surface_differs,
            verdict=report.verdict,
            gate=decision.gate,
            findings=tuple(
                SignedFinding(clause=f.clause, status=f.status, sentence=f.sentence) for f in decision.findings
            ),
            report_sha256=report_sha256,
            safety=_outcomes_to_result(result.outcomes, result.output),
            signed_by=signed_by,
            signed_at=datetime.now(UTC),
        )
        path = _confirm_and_write(folder, manifest, key, confirm=confirm, reporter=reporter, output=result.output)
        reporter.give({"outcome": "promoted", **result.to_json(), "manifests": [_manifest_to_json(manifest, path)]})
        return 0


def roll_back(config: BridgeConfig, number: int, signed_by: str | None, confirm: Confirm, reporter: Reporter) -> int:
    """Signs off the versions of an earlier manifest again, with a new manifest. Returns the exit code 0.

    Raises:
        BridgeError: there is no such manifest, the chain does not hold, or the weights changed since.
    """
    folder = RunFolder(config.run_folder)
    signer = _clean_signer(signed_by)
    key = read_signing_key(config.promote.key_env)
    _refuse_no_folder(folder)
    with folder.lock_for("promote"):
        chain = open_chain(folder.path, key, reporter.say)
        if not 1 <= number <= len(chain):
            available = f"1 to {len(chain)}" if chain else "none"
            raise ConfigError(f"promote --rollback: there is no manifest {number}; there are: {available}")
        earlier = chain[number - 1]
        _check_manifest_weights(config, folder, earlier, reporter=reporter)
        next_number, previous = next_chain_position(folder.path)
        manifest = earlier.model_copy(
            update={
                "number": next_number,
                "previous_sha256": previous,
                "rollback_to": earlier.rollback_to or number,
                "signed_by": signer,
                "signed_at": datetime.now(UTC),
                "signature": None,
            }
        )
        path = _confirm_and_write(folder, manifest, key, confirm=confirm, reporter=reporter, output=b"")
        manifests = [_manifest_to_json(manifest, path)]
        reporter.give({"outcome": "promoted", "gate": None, "safety": [], "manifests": manifests})
        return 0


def verify(config: BridgeConfig, reporter: Reporter) -> int:
    """Checks the chain of manifests, their signatures, and the newest one's adapters. Returns the exit code 0.

    Raises:
        BridgeError: something is not as it was signed off; the message names it.
    """
    folder = RunFolder(config.run_folder)
    key = read_signing_key(config.promote.key_env)
    _refuse_no_folder(folder)
    folder.refuse_unsafe()
    chain = verify_chain(folder.path, key)
    if not chain:
        raise ConfigError(f"promote --verify: nothing was promoted in {folder.path}")
    _check_manifest_weights(config, folder, chain[-1], reporter=reporter)
    for manifest in chain:
        signature = (
            "not signed" if manifest.signature is None else "signed" if key else "signed, no key to check it with"
        )
        reporter.say(f"{_title(manifest)}: {signature}")
    reporter.say(f"{len(chain)} manifests hold together, and the weights are those of the newest")
    manifests = [_manifest_to_json(manifest, folder.path / FOLDER / f"{manifest.number}.json") for manifest in chain]
    reporter.give({"outcome": "verified", "gate": None, "safety": [], "manifests": manifests})
    return 0


def _refuse_no_folder(folder: RunFolder) -> None:
    if not folder.path.is_dir():
        raise ConfigError(f"promote: there is no run folder {folder.path}")


def read_report(folder: RunFolder) -> tuple[Report, str]:
    """The newest report of a run folder, and its SHA-256. Raises ConfigError where there is none."""
    path = folder.path / "report.json"
    try:
        content = path.read_bytes()
        return Report.model_validate_json(content), hashlib.sha256(content).hexdigest()
    except FileNotFoundError:
        raise ConfigError(f"promote: there is no {path}; run `marft-bridge compare` first") from None
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"promote: {path} is no report of this version ({reason}); run `marft-bridge compare`"
        ) from None


# -- what is signed -------------------------------------------------------------------------------------------


def _confirm_and_write(
    folder: RunFolder, manifest: Manifest, key: bytes | None, confirm: Confirm, reporter: Reporter, output: bytes
) -> Path:
    if not confirm(f"sign off {_title(manifest)}, for {folder.path}"):
        raise ConfigError("promote: not signed off; nothing was changed")
    if output:
        write_output(folder, str(manifest.number), output)
    path = write_manifest(folder.path, manifest if key is None else manifest.signed(key))
    reporter.say(f"promoted {_title(manifest)}: {path}")
    return path


def _manifest_to_json(manifest: Manifest, path: Path) -> dict[str, Any]:
    return {
        "number": manifest.number,
        "versions": dict(manifest.versions),
        "hosted": list(manifest.hosted),
        "signed_by": manifest.signed_by,
        "rollback_to": manifest.rollback_to,
        "file": str(path),
    }


def _title(manifest: Manifest) -> str:
    adapters = ", ".join(f"{node}@{version}" for node, version in sorted(manifest.versions.items()))
    rollback_note = f", rolled back to {manifest.rollback_to}" if manifest.rollback_to is not None else ""
    hosted_note = f", hosted: {', '.join(manifest.hosted)}" if manifest.hosted else ""
    return f"number {manifest.number}{rollback_note}: {adapters}{hosted_note}, by {manifest.signed_by}"


def _clean_signer(signed_by: str | None) -> str:
    if not signed_by or not signed_by.strip():
        raise ConfigError('promote: say who signs off, with --by "Jane Doe"')
    return " ".join(signed_by.split())


def _check_manifest_weights(config: BridgeConfig, folder: RunFolder, manifest: Manifest, reporter: Reporter) -> None:
    registry = config_to_versions(config, folder.adapters, reporter.say).registry
    if any(registry.base_of(node) != sha256 for node, sha256 in manifest.bases.items()):
        raise ConfigError(f"promote: manifest {manifest.number} is of another base model than {config.model.path}")
    for node, adapter in manifest.adapters.items():
        check_files(Path(registry.get(node, adapter.version).path), adapter.file_hashes)


def _outcomes_to_result(outcomes: Sequence[SuiteOutcome], output: bytes) -> SafetyResult | None:
    if not outcomes:
        return None
    digest = hashlib.sha256(output).hexdigest() if output else None
    return SafetyResult(
        suite=tuple(outcome.suite for outcome in outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
        output_sha256=digest,
    )
