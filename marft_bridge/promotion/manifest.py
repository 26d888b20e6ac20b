"""A promotion that is signed off <-> `promoted/<n>.json` of a run folder; the adapter versions that the newest names.

    promoted/1.json, 2.json ...   manifests; each holds the SHA-256 of the one before it
    promoted/current.json         number and SHA-256 of the newest
    promoted/<n>.safety.txt       the output of the safety suite

Invariants: a manifest is never overwritten, a rollback is a new one; one that was changed or exchanged, or removed from
before another, is detected, and with a key also one that somebody without the key wrote.

What the folder alone cannot tell, with a key or without: that it is an older state of itself. `current.json` is not
signed, so whoever can write here can delete the newest manifests, or all, and have it name an earlier one, which
somebody did sign. Only a copy elsewhere of the newest number and hash shows that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import tempfile
from collections.abc import Callable
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

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.common.files import write_atomically
from marft_bridge.serving.adapter_checks import CONFIG_FILE, WEIGHTS_FILE, folder_to_hashes
from trace_store.files import make_folder, sync
from trace_store.records import AdapterRow

FOLDER = "promoted"
CURRENT = "current.json"
_NUMBERED = re.compile(r"([1-9][0-9]*)\.json")  # the names that `write_manifest` gives, and no others such as 01.json


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PromotedAdapter(_Record):
    """One node's adapter version, with the hashes of its two files and of its base model's weights."""

    version: int = Field(ge=0)
    sha256: str  # of its weights
    config_sha256: str | None = None  # of its adapter_config.json, which scales them; earlier releases did not sign it
    base_sha256: str | None = None  # of its base model's, where that is not the manifest's

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what is None, so that signatures from before there were these fields stay valid."""
        content: dict[str, Any] = serialise(self)
        return {name: value for name, value in content.items() if value is not None}

    @property
    def file_hashes(self) -> dict[str, str]:
        """Name of a file of the adapter's folder -> the SHA-256 that is signed."""
        config = {} if self.config_sha256 is None else {CONFIG_FILE: self.config_sha256}
        return {WEIGHTS_FILE: self.sha256} | config


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


def newest_manifest(folder: Path, key_env: str | None) -> Manifest | None:
    """The newest promotion of a run folder; None where there is none.

    Args:
        key_env: variable of the signing key; read where there is a promotion. None: signatures are not checked.

    Raises:
        ConfigError: the manifest's hash is not the one in current.json, it is not signed with the key, or there is no
            such key.
    """
    current = _read_current(folder)
    if current is None:
        return None
    number, digest = current
    path = folder / FOLDER / f"{number}.json"
    hint = "see `marft-bridge promote --verify`"
    if not path.exists() or _file_sha256(path) != digest:
        raise ConfigError(f"{path} is not the manifest that {CURRENT} names; {hint}")
    manifest = _read_manifest(path)
    if manifest.number != number:
        raise ConfigError(f"{path} says that it is number {manifest.number}; {hint}")
    key = read_signing_key(key_env)
    if key is not None and (fault := _find_signature_fault(manifest, key)):
        raise ConfigError(f"{path} {fault}; {hint}")
    return manifest


def refuse_other_weights(manifest: Manifest, node: str, row: AdapterRow) -> None:
    """Raises ServingError where a registered version of a node is not what the manifest signs off: a version is only a
    number, and whoever exchanges weights or configuration can exchange the record beside them."""
    adapter = manifest.adapters[node]
    signed = (adapter.version, adapter.sha256, manifest.bases[node])
    is_signed = (row.version, row.sha256, row.base_sha256) == signed
    # the files themselves: a record of an earlier release says nothing of the configuration, and any can be made to
    if not is_signed or folder_to_hashes(Path(row.path), adapter.file_hashes) != adapter.file_hashes:
        raise ServingError(
            f"adapter v{row.version} of node {node!r} is not the one that promotion {manifest.number} signed off: "
            "other weights, another adapter_config.json or another base model; see `marft-bridge promote --verify`"
        )


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
    _write_current(folder, manifest.number)
    return path


def _write_current(folder: Path, number: int) -> None:
    promoted_folder = folder / FOLDER
    content = {"number": number, "sha256": _file_sha256(promoted_folder / f"{number}.json")}
    write_atomically(promoted_folder / CURRENT, json.dumps(content) + "\n")


def verify_chain(folder: Path, key: bytes | None) -> list[Manifest]:
    """Reads all manifests, oldest first, and checks each against the hash of the one before it and against the key.

    With a key the newest must be signed. Older ones may lack a signature only where no signed one comes before them:
    they were written before there was a key, and the first signed one fixes them by its hash.

    Not found: a whole chain that is older than the last promotion, see the top of this file.

    Raises:
        ConfigError: one is missing, changed, or not signed with this key; or `current.json` does not name the newest.
    """
    chain = _read_chain(folder, key, will_extend=False)
    _refuse_other_current(folder, chain)
    return chain


def open_chain(folder: Path, key: bytes | None, notify: Callable[[str], None]) -> list[Manifest]:
    """As `verify_chain`, before another manifest is added, under the lock of the run folder.

    The chain may be without any signature yet. A command that was killed between its manifest, which a person had
    confirmed, and `current.json` left the latter naming the manifest before; then it is written now.

    Args:
        notify: takes one line for the user, where `current.json` was written.

    Raises:
        ConfigError: as `verify_chain`; nothing was changed.
    """
    chain = _read_chain(folder, key, will_extend=True)
    if chain and _is_unfinished(folder, chain, key):
        _write_current(folder, chain[-1].number)
        notify(
            f"promotion {chain[-1].number} was signed off by a command that was killed before {CURRENT} named it; "
            "it does now"
        )
    _refuse_other_current(folder, chain)
    return chain


def _is_unfinished(folder: Path, chain: list[Manifest], key: bytes | None) -> bool:
    """Whether all is as `write_manifest` leaves it just before its last step; with a key, signed with it."""
    newest = chain[-1]
    previous = None if newest.previous_sha256 is None else (newest.number - 1, newest.previous_sha256)
    return _read_current(folder) == previous and (key is None or newest.is_signed_with(key))


def _refuse_other_current(folder: Path, chain: list[Manifest]) -> None:
    newest, title = None, "a manifest"
    if chain:
        path = folder / FOLDER / f"{chain[-1].number}.json"
        newest, title = (chain[-1].number, _file_sha256(path)), str(path)
    if _read_current(folder) != newest:
        raise ConfigError(f"promote --verify: {folder / FOLDER / CURRENT} does not name {title}, as it is now")


def _read_chain(folder: Path, key: bytes | None, *, will_extend: bool) -> list[Manifest]:
    """All manifests, oldest first, each checked; whether `current.json` names the newest is not.

    Args:
        will_extend: another manifest is about to be added; then the newest needs no signature.
    """
    promoted_folder = folder / FOLDER
    numbers = _manifest_numbers(folder)
    for expected, number in enumerate(numbers, start=1):
        if number != expected:
            raise ConfigError(f"promote --verify: {promoted_folder / f'{expected}.json'} is missing")
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
        if key is not None and needs_signature and (fault := _find_signature_fault(manifest, key)):
            raise ConfigError(f"promote --verify: {path} {fault}")
        _check_safety_output(promoted_folder, manifest)
        previous = _file_sha256(path)
        chain.append(manifest)
    return chain


def _find_signature_fault(manifest: Manifest, key: bytes) -> str | None:
    if manifest.is_signed_with(key):
        return None
    return "is not signed" if manifest.signature is None else "was changed, or signed with another key"


def _check_safety_output(promoted_folder: Path, manifest: Manifest) -> None:
    """Compares the output file with its hash. A rollback has that of the manifest it repeats."""
    if manifest.safety is None or manifest.safety.output_sha256 is None:
        return
    path = promoted_folder / f"{manifest.rollback_to or manifest.number}.safety.txt"
    if not path.exists() or _file_sha256(path) != manifest.safety.output_sha256:
        raise ConfigError(f"promote --verify: {path} is not what the safety suite printed")


def _manifest_numbers(folder: Path) -> list[int]:
    """The numbers of all manifests, ascending; files of other names are none."""
    names = (_NUMBERED.fullmatch(path.name) for path in (folder / FOLDER).glob("*.json"))
    return sorted(int(name[1]) for name in names if name is not None)


def _read_current(folder: Path) -> tuple[int, str] | None:
    path = folder / FOLDER / CURRENT
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return int(content["number"]), str(content["sha256"])
    except (ValueError, KeyError, TypeError, OverflowError):
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
