"""`marft-bridge promote`: a comparison's report -> adapter versions that somebody signed off, or the reasons why not.

In order: the gate on the report, the weights, the safety suite, the person, the manifest. Invariants: nothing is
signed off that was not compared, whose weights changed since, or whose declared safety suite did not pass; a refusal
leaves everything as it was. What a gate, a suite and a manifest are is decided in `comparison`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from marft_bridge.adapter_files import check_weights
from marft_bridge.bases import config_to_bases
from marft_bridge.comparison import manifest as records
from marft_bridge.comparison.checking import check, keep_output
from marft_bridge.comparison.manifest import Manifest, SafetyResult, SignedFinding
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.safety import SafetyEnd
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from marft_bridge.served_models import ServedModels

Confirm = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    candidate: str | None = None  # None: the only one
    gate: str | None = None  # None: promote.gate, or that the deciding metric is better
    signed_by: str | None = None


def promote(config: BridgeConfig, request: Request, confirm: Confirm, reporter: Reporter) -> int:
    """Signs the candidate of the newest report off, if everything that was asked for holds.

    Args:
        confirm: asked once, with all that will be signed.

    Returns:
        The exit code: 0 promoted, 3 refused, 4 not settled.

    Raises:
        BridgeError, StoreError, TrainError: see the messages; nothing was promoted.
    """
    folder = RunFolder(config.run_folder)
    signed_by = _signer(request.signed_by)
    key = records.key_of(config.promote.key_env)
    report, report_sha256 = read_report(folder)
    with folder.held_by("promote"):
        records.verified_chain(folder.path, key, to_go_on=True)
        checked = check(config, report, request.gate, request.candidate, reporter)
        if checked.exit_code:
            return checked.exit_code
        decision = checked.decision
        number, previous = records.next_place(folder.path)
        manifest = Manifest(
            number=number,
            previous_sha256=previous,
            candidate=decision.candidate,
            base=report.base,
            graph=report.setup.graph,
            model=report.setup.model,
            base_sha256=checked.base_sha256,
            adapters=checked.adapters,
            tool_surface=dict(report.setup.tool_surface),
            tool_surface_differs=report.setup.tool_surface_differs,
            verdict=report.verdict,
            gate=decision.gate,
            findings=tuple(
                SignedFinding(clause=f.clause, status=f.status, sentence=f.sentence) for f in decision.findings
            ),
            report_sha256=report_sha256,
            safety=_ends_to_result(checked.ends, checked.output),
            signed_by=signed_by,
            signed_at=datetime.now(UTC),
        )
        return _write(folder, manifest, key, confirm, reporter, checked.output)


def roll_back(config: BridgeConfig, number: int, signed_by: str | None, confirm: Confirm, reporter: Reporter) -> int:
    """Signs off the versions of an earlier manifest again, by a new one. Returns 0.

    Raises:
        BridgeError: there is no such manifest, the chain does not hold, or the weights changed since.
    """
    folder = RunFolder(config.run_folder)
    who = _signer(signed_by)
    key = records.key_of(config.promote.key_env)
    _refuse_no_folder(folder)
    with folder.held_by("promote"):
        chain = records.verified_chain(folder.path, key, to_go_on=True)
        if not 1 <= number <= len(chain):
            known = f"1 to {len(chain)}" if chain else "none"
            raise ConfigError(f"promote --rollback: there is no manifest {number}; there are: {known}")
        old = chain[number - 1]
        _check_manifest_weights(config, folder, old, reporter)
        next_number, previous = records.next_place(folder.path)
        manifest = old.model_copy(
            update={
                "number": next_number,
                "previous_sha256": previous,
                "rollback_to": old.rollback_to or number,
                "signed_by": who,
                "signed_at": datetime.now(UTC),
                "signature": None,
            }
        )
        return _write(folder, manifest, key, confirm, reporter, b"")


def verify(config: BridgeConfig, reporter: Reporter) -> int:
    """Holds every manifest against the others, the key and the weights. Returns 0.

    Raises:
        BridgeError: something is not as it was signed off; the message names it.
    """
    folder = RunFolder(config.run_folder)
    key = records.key_of(config.promote.key_env)
    _refuse_no_folder(folder)
    chain = records.verified_chain(folder.path, key)
    if not chain:
        raise ConfigError(f"promote --verify: nothing was promoted in {folder.path}")
    _check_manifest_weights(config, folder, chain[-1], reporter)
    for manifest in chain:
        signature = (
            "not signed" if manifest.signature is None else "signed" if key else "signed, no key to check it with"
        )
        reporter.say(f"{_title(manifest)}: {signature}")
    reporter.say(f"{len(chain)} manifests hold together, and the weights are those of the newest")
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
        why = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"promote: {path} is no report of this version ({why}); run `marft-bridge compare`") from None


# -- what is signed -------------------------------------------------------------------------------------------


def _write(
    folder: RunFolder, manifest: Manifest, key: bytes | None, confirm: Confirm, reporter: Reporter, output: bytes
) -> int:
    if not confirm(f"sign off {_title(manifest)}, for {folder.path}"):
        raise ConfigError("promote: not signed off; nothing was changed")
    if output:
        keep_output(folder, str(manifest.number), output)
    path = records.write_manifest(folder.path, manifest if key is None else manifest.signed(key))
    reporter.say(f"promoted {_title(manifest)}: {path}")
    return 0


def _title(manifest: Manifest) -> str:
    adapters = ", ".join(f"{node}@{version}" for node, version in sorted(manifest.versions.items()))
    again = f", rolled back to {manifest.rollback_to}" if manifest.rollback_to is not None else ""
    return f"number {manifest.number}{again}: {adapters}, by {manifest.signed_by}"


def _signer(signed_by: str | None) -> str:
    if not signed_by or not signed_by.strip():
        raise ConfigError('promote: say who signs off, with --by "Jane Doe"')
    return " ".join(signed_by.split())


def _check_manifest_weights(config: BridgeConfig, folder: RunFolder, manifest: Manifest, reporter: Reporter) -> None:
    models = ServedModels(config, config_to_bases(config, reporter.say), folder.adapters)
    if any(models.registry.base_of(node) != sha256 for node, sha256 in manifest.bases.items()):
        raise ConfigError(f"promote: manifest {manifest.number} is of another base model than {config.model.path}")
    for node, adapter in manifest.adapters.items():
        check_weights(Path(models.registry.get(node, adapter.version).path), adapter.sha256)


def _ends_to_result(ends: Sequence[SafetyEnd], output: bytes) -> SafetyResult | None:
    if not ends:
        return None
    digest = hashlib.sha256(output).hexdigest() if output else None
    return SafetyResult(
        suite=tuple(end.suite for end in ends), seconds=sum(end.seconds for end in ends), output_sha256=digest
    )
