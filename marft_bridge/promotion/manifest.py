"""A promotion that is signed off <-> `promoted/<n>.json` of a run folder; the adapter versions that the newest names.

    promoted/1.json, 2.json ...   manifests; each holds the SHA-256 of the one before it
    promoted/current.json         number and SHA-256 of the newest
    promoted/<n>.safety.txt       the output of the safety suite

Invariants: a manifest is never overwritten, a rollback is a new one; one that was changed, exchanged or removed from
the chain is detected, and with a key also one that somebody without the key wrote.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.files import write_atomically
from trace_store.files import make_folder, sync

FOLDER = "promoted"
CURRENT = "current.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromotedAdapter(_Record):
    """One node's adapter version, with the hashes of its weights and of its base model's."""

    version: int = Field(ge=0)
    sha256: str  # of its weights
    base_sha256: str | None = None  # of its base model's, where that is not the manifest's

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out `base_sha256` where it is None, so that signatures from before there was this field stay valid."""
        content: dict[str, Any] = serialise(self)
        return {name: value for name, value in content.items() if name != "base_sha256" or value is not None}


class SignedFinding(_Record):
    """One clause of the gate, with its status and its numbers in a sentence."""

    clause: str
    status: str
    sentence: str


class SafetyResult(_Record):
    """The safety suite that passed, and the hash of its output."""

    suite: tuple[str, ...]  # the function's name, the command; whichever there were
    passed: Literal[True] = True  # without it there is no manifest
    seconds: float
    output_sha256: str | None = None  # of <n>.safety.txt


class Manifest(_Record):
    """The adapter versions of one promotion, the evidence for it, and who signed it off."""

    schema_version: Literal[1] = 1
    number: int = Field(ge=1)
    previous_sha256: str | None  # of the manifest before it, as it lies on disk
    candidate: str
    base: str  # variant that it was compared with
    graph: str
    model: str
    base_sha256: str  # of the weights of the base model of [model]
    adapters: dict[str, PromotedAdapter]
    hosted: tuple[str, ...] = ()  # nodes that go on calling the models that the app was written with
    tool_surface: dict[str, str]
    tool_surface_differs: bool
    verdict: str
    gate: str
    findings: tuple[SignedFinding, ...]
    report_sha256: str
    safety: SafetyResult | None
    rollback_to: int | None = None  # number of the manifest whose versions these are again
    signed_by: str
    signed_at: datetime
    signature: str | None = None  # HMAC-SHA256 of all other fields

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out `hosted` where it is empty, so that signatures from before there was this field stay valid."""
        content: dict[str, Any] = serialise(self)
        return {name: value for name, value in content.items() if name != "hosted" or value}

    @property
    def versions(self) -> dict[str, int]:
        """Node -> version."""
        return {node: adapter.version for node, adapter in self.adapters.items()}

    @property
    def bases(self) -> dict[str, str]:
        """Node -> SHA-256 of the weights of the base model that it runs on."""
        return {node: adapter.base_sha256 or self.base_sha256 for node, adapter in self.adapters.items()}

    def signed(self, key: bytes) -> Manifest:
        """A copy with its signature under `key`."""
        return self.model_copy(update={"signature": self._digest(key)})

    def is_signed_with(self, key: bytes) -> bool:
        """Whether the signature is that of the other fields under this key."""
        return self.signature is not None and hmac.compare_digest(self.signature, self._digest(key))

    def _digest(self, key: bytes) -> str:
        content = self.model_dump(mode="json", exclude={"signature"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def promoted_versions(folder: Path) -> dict[str, int] | None:
    """The adapter versions that the newest promotion of a run folder names, by node; None where there is none.

    Raises: as `newest_manifest`.
    """
    manifest = newest_manifest(folder)
    return None if manifest is None else manifest.versions


def newest_manifest(folder: Path) -> Manifest | None:
    """The newest promotion of a run folder; None where there is none.

    Raises:
        ConfigError: the manifest's hash is not the one in current.json.
    """
    current = _read_current(folder)
    if current is None:
        return None
    number, digest = current
    path = folder / FOLDER / f"{number}.json"
    if not path.exists() or _file_sha256(path) != digest:
        raise ConfigError(f"{path} is not the manifest that {CURRENT} names; see `marft-bridge promote --verify`")
    return _read_manifest(path)


def read_signing_key(variable: str | None) -> bytes | None:
    """The signing key, from the environment; None where the configuration names none.

    Raises:
        ConfigError: the variable is not set, or its key is shorter than 16 bytes.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").encode()
    if len(key) < 16:
        raise ConfigError(f"promote.key_env: {variable} holds {len(key)} bytes; a key has 16 or more")
    return key


def next_chain_position(folder: Path) -> tuple[int, str | None]:
    """The number of the next manifest, and the SHA-256 of the newest one; None where there is none yet."""
    numbers = _manifest_numbers(folder)
    if not numbers:
        return 1, None
    return numbers[-1] + 1, _file_sha256(folder / FOLDER / f"{numbers[-1]}.json")


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes a manifest, mode 0600, and makes it the current one.

    Raises:
        ConfigError: there is one of its number already.
    """
    promoted_folder = folder / FOLDER
    make_folder(promoted_folder)
    path = promoted_folder / f"{manifest.number}.json"
    handle, temporary = tempfile.mkstemp(dir=promoted_folder, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(manifest.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # refuses a name that is taken
        sync(promoted_folder)  # before the file that points to it
    except FileExistsError:
        raise ConfigError(f"{path} is there; a manifest is never overwritten") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    write_atomically(
        promoted_folder / CURRENT, json.dumps({"number": manifest.number, "sha256": _file_sha256(path)}) + "\n"
    )
    return path


def verify_chain(folder: Path, key: bytes | None, *, will_extend: bool = False) -> list[Manifest]:
    """Reads all manifests, oldest first, and checks each against the hash of the one before it and against the key.

    With a key the newest must be signed. Older ones may lack a signature only where no signed one comes before them:
    they were written before there was a key, and the first signed one fixes them by its hash.

    Args:
        will_extend: another manifest is about to be added; then the chain may be without any signature yet.

    Raises:
        ConfigError: one is missing, changed, or not signed with this key; or `current.json` does not name the newest.
    """
    promoted_folder = folder / FOLDER
    numbers = _manifest_numbers(folder)
    if numbers != list(range(1, len(numbers) + 1)):
        missing = min(set(range(1, numbers[-1] + 1)) - set(numbers))
        raise ConfigError(f"promote --verify: {promoted_folder / f'{missing}.json'} is missing")
    chain: list[Manifest] = []
    previous: str | None = None
    for number in numbers:
        path = promoted_folder / f"{number}.json"
        manifest = _read_manifest(path)
        if manifest.number != number:
            raise ConfigError(f"promote --verify: {path} says that it is number {manifest.number}")
        if manifest.previous_sha256 != previous:
            raise ConfigError(
                f"promote --verify: {path} does not follow from the manifest before it, which was changed"
            )
        signed_before = any(earlier.signature is not None for earlier in chain)
        is_newest = number == numbers[-1] and not will_extend
        needs_signature = signed_before or manifest.signature is not None or is_newest
        if key is not None and needs_signature and not manifest.is_signed_with(key):
            fault = "is not signed" if manifest.signature is None else "was changed, or signed with another key"
            raise ConfigError(f"promote --verify: {path} {fault}")
        _check_safety_output(promoted_folder, manifest)
        previous = _file_sha256(path)
        chain.append(manifest)
    current = _read_current(folder)
    if current != ((numbers[-1], previous) if numbers else None):
        last = promoted_folder / f"{numbers[-1]}.json" if numbers else "a manifest"
        raise ConfigError(f"promote --verify: {promoted_folder / CURRENT} does not name {last}, as it is now")
    return chain


def _check_safety_output(promoted_folder: Path, manifest: Manifest) -> None:
    """Compares the output file with its hash. A rollback has that of the manifest it repeats."""
    if manifest.safety is None or manifest.safety.output_sha256 is None:
        return
    path = promoted_folder / f"{manifest.rollback_to or manifest.number}.safety.txt"
    if not path.exists() or _file_sha256(path) != manifest.safety.output_sha256:
        raise ConfigError(f"promote --verify: {path} is not what the safety suite printed")


def _manifest_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / FOLDER).glob("*.json") if path.stem.isdecimal())


def _read_current(folder: Path) -> tuple[int, str] | None:
    path = folder / FOLDER / CURRENT
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return int(content["number"]), str(content["sha256"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is unreadable; see `marft-bridge promote --verify`") from None


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field_path = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{path} is no manifest: {field_path}: {problem['msg']}") from None


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
