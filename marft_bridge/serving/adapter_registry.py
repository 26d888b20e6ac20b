"""A trained adapter folder -> a registered version of a node -> a name that the model server answers to.

Layout: root/<node>/<version>/ with the adapter's own two files and `marft.json`, which is written last: a folder
without it was left by an interrupted run. Once it was served, root/<node>/<version>-<digest of its files>/ lies beside
it, an empty folder that the path goes through: of an adapter a server tells nothing but the path that it was given.
Invariants: a registered version never changes (its hashes are checked when it is published); a served name means one
version of one node, with the very files that are registered here, also in a server that outlived another run in this
folder; versions of another base model are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from marft_bridge.common.errors import ServingError
from marft_bridge.common.files import write_atomically
from marft_bridge.serving.adapter_checks import CONFIG_FILE, WEIGHTS_FILE, check_files, folder_to_hashes
from marft_bridge.serving.vllm_server import ModelServer
from trace_store.files import make_folder, open_to_write, sync
from trace_store.records import AdapterRow

_MAX_NAME, _DIGEST = 200, 32  # characters; a file system takes 255 bytes, and a version comes behind the name
_FILES_DIGEST = 16  # of the files of a version, in hex digits
_RECORD_FILE = "marft.json"
_NO_NODES: Mapping[str, str] = MappingProxyType({})
_CONFIG_SHA256 = "config_sha256"  # in the record only; records of earlier releases lack it


def safe_node_name(node: str) -> str:
    """A node name, subgraph path included, as one folder name and as part of a served name.

    Letters, digits, `_` and `-` stay; any other byte of the UTF-8 form becomes `.` and two hex digits. Two nodes
    never share a name: "team/planner" is "team.2Fplanner", and a "." is ".2E". What would be longer than a file system
    takes is cut, and ends in a digest of the whole.
    """
    if not node:
        raise ServingError("a node without a name has no adapter")
    safe_name = "".join(
        chr(byte) if re.match(rb"[A-Za-z0-9_-]", bytes([byte])) else f".{byte:02X}" for byte in node.encode()
    )
    if len(safe_name) <= _MAX_NAME:
        return safe_name
    return f"{safe_name[: _MAX_NAME - _DIGEST - 2]}..{hashlib.sha256(node.encode()).hexdigest()[:_DIGEST]}"


class AdapterRegistry:
    """The adapter versions under one folder.

    Args:
        root: is made when it is missing, 0700.
        base_sha256: of the base model's weights that these adapters belong to.
        base_sha256_by_node: the same for each node that runs on another base model.
    """

    def __init__(self, root: Path, base_sha256: str, base_sha256_by_node: Mapping[str, str] = _NO_NODES) -> None:
        self.root = root
        self._base_sha256, self._base_sha256_by_node = base_sha256, base_sha256_by_node

    def base_of(self, node: str) -> str:
        """SHA-256 of the weights of the base model that a node runs on."""
        return self._base_sha256_by_node.get(node, self._base_sha256)

    @staticmethod
    def served_name(node: str, version: int) -> str:
        """The name to send as `model`: "node@version", with the node's name made safe."""
        return f"{safe_node_name(node)}@{version}"

    def new_folder(self, node: str, version: int) -> Path:
        """An empty folder for the files of a version that is not registered yet.

        Raises:
            ServingError: the version exists; versions are never overwritten.
        """
        folder = self._folder(node, version)
        if (folder / _RECORD_FILE).exists():
            raise ServingError(f"node {node!r} already has adapter v{version}; a version is never overwritten")
        for part in (self.root, folder.parent, folder):
            make_folder(part)
        shutil.rmtree(folder)  # of an interrupted run: without a record it was never served
        make_folder(folder)
        return folder

    def register(self, node: str, version: int, parent: int | None, metrics: Mapping[str, Any]) -> AdapterRow:
        """Makes the files in the version's folder a registered version.

        Args:
            parent: the version it was trained from, None for the first.
            metrics: JSON values.

        Raises:
            ServingError: the folder has no weights, the version exists, or the parent does not.
        """
        folder = self._folder(node, version)
        if (folder / _RECORD_FILE).exists():
            raise ServingError(f"node {node!r} already has adapter v{version}; a version is never overwritten")
        if not (folder / WEIGHTS_FILE).is_file():
            raise ServingError(f"adapter v{version} of node {node!r} has no {WEIGHTS_FILE} in {str(folder)!r}")
        if parent is not None:
            self.get(node, parent)
        hashes = folder_to_hashes(folder)
        record: dict[str, Any] = {
            "node": node,
            "version": version,
            "parent": parent,
            "sha256": hashes[WEIGHTS_FILE],
            "base_sha256": self.base_of(node),
            "created_ns": time.time_ns(),
            "metrics": dict(metrics),
        }
        for file in filter(Path.is_file, folder.iterdir()):
            handle = open_to_write(file)
            try:
                os.fchmod(handle, 0o600)
                os.fsync(handle)  # before the record that says that they are whole
            finally:
                os.close(handle)
        make_folder(_waypoint(folder, hashes))
        for unsynced_folder in (folder, folder.parent, self.root, self.root.parent):
            sync(unsynced_folder)
        content = record | {_CONFIG_SHA256: hashes.get(CONFIG_FILE)}
        write_atomically(folder / _RECORD_FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")
        return AdapterRow(path=str(folder), **record)

    def get(self, node: str, version: int) -> AdapterRow:
        """One registered version.

        Raises:
            ServingError: there is no such version, its record is unreadable, or it belongs to another base model.
        """
        folder = self._folder(node, version)
        try:
            record = json.loads((folder / _RECORD_FILE).read_text(encoding="utf-8"))
            record.pop(_CONFIG_SHA256, None)
            row = AdapterRow(path=str(folder), **record)
        except FileNotFoundError:
            published = ", ".join(f"v{registered}" for registered in self.versions(node)) or "none"
            raise ServingError(f"node {node!r} has no adapter v{version}; published: {published}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ServingError(
                f"{str(folder / _RECORD_FILE)!r} is unreadable ({error}); delete that version"
            ) from error
        if row.base_sha256 != (base := self.base_of(node)):
            raise ServingError(
                f"adapter v{version} of node {node!r} was trained on another base model "
                f"({row.base_sha256[:12]}, not {base[:12]}); use that model or another run folder"
            )
        return row

    def hashes(self, node: str, version: int) -> dict[str, str]:
        """File name -> SHA-256 of the file when the version was registered. Raises as `get`."""
        row = self.get(node, version)
        config = json.loads((Path(row.path) / _RECORD_FILE).read_text(encoding="utf-8")).get(_CONFIG_SHA256)
        return {WEIGHTS_FILE: row.sha256} | ({CONFIG_FILE: config} if config is not None else {})

    def files(self, node: str, version: int) -> dict[str, bytes]:
        """File name -> content of a registered version, its record too, for `adopt` on another machine. Raises as
        `get`."""
        folder = Path(self.get(node, version).path)
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}

    def adopt(self, node: str, version: int, files: Mapping[str, bytes]) -> AdapterRow:
        """Writes a version that another registry registered, 0600; its hashes are checked when it is published.

        Args:
            files: of `files`.

        Raises:
            ServingError: the version exists here, or belongs to another base model.
        """
        folder = self.new_folder(node, version)
        for name in sorted(files, key=lambda name: name == _RECORD_FILE):  # the record last
            with os.fdopen(open_to_write(folder / Path(name).name), "wb") as file:
                file.write(files[name])
        return self.get(node, version)

    def served_path(self, node: str, version: int) -> Path:
        """The path under which a version is served: its folder, by way of an empty one in it, named by its files.

        Other files under the same name have another path, so that neither we nor the server's cache of prefixes, which
        goes by name and path as they are written, take one for the other. It is no link, which a run folder may not
        hold, and lies in the version's folder, so that beside a node's versions there is nothing else.

        Raises:
            ServingError: as `get`.
        """
        folder = Path(self.get(node, version).path).resolve()
        waypoint = _waypoint(folder, self.hashes(node, version))
        make_folder(waypoint)  # in what an earlier release registered, or another machine, there is none
        return waypoint / ".."

    def is_own_path(self, node: str, version: int, path: Path) -> bool:
        """Whether what is served from `path` was served as this version from this folder, by whichever run."""
        return path.resolve() == self._folder(node, version).resolve()

    def delete(self, node: str, version: int) -> None:
        """Deletes the files of a version that is out of service, the record first."""
        folder = self._folder(node, version)
        (folder / _RECORD_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def latest(self, node: str) -> AdapterRow | None:
        """The highest version of a node; None when it has none and runs on the base model."""
        versions = self.versions(node)
        return self.get(node, versions[-1]) if versions else None

    def versions(self, node: str) -> list[int]:
        """Registered versions of a node, ascending."""
        records = (self.root / safe_node_name(node)).glob(f"*/{_RECORD_FILE}")
        return sorted(int(record.parent.name) for record in records if record.parent.name.isdecimal())

    def _folder(self, node: str, version: int) -> Path:
        if version < 0:
            raise ServingError(f"node {node!r} has no adapter v{version}: versions count from 0")
        return self.root / safe_node_name(node) / str(version)


def _waypoint(folder: Path, hashes: Mapping[str, str]) -> Path:
    """The empty folder in a version's that is named by the registered files, see `AdapterRegistry.served_path`."""
    files = json.dumps(sorted(hashes.items())).encode()
    return folder / hashlib.sha256(files).hexdigest()[:_FILES_DIGEST]


def publish(server: ModelServer, registry: AdapterRegistry, node: str, version: int) -> str:
    """Loads a version into the server; returns its served name. Only checks its files when it is served already.

    What an earlier run in this folder left under its name, in a server that runs on, goes first.

    Raises:
        ServingError: no such version, its files are not those that were registered, the server refuses it, or
            another folder is served under its name.
    """
    row, hashes = registry.get(node, version), registry.hashes(node, version)
    name, path = registry.served_name(node, version), registry.served_path(node, version)
    served = server.adapters().get(name)
    if served is not None and Path(served) != path and registry.is_own_path(node, version, Path(served)):
        server.unload_adapter(name)
        served = None
    if served is not None:
        check_files(Path(row.path), hashes)
    else:
        server.load_adapter(name, path, hashes)
        served = server.adapters().get(name)
    if served is None or Path(served) != path:
        raise ServingError(f"the model server serves {served or 'nothing'} as {name!r}, not {str(path)!r}")
    return name


def retire(server: ModelServer, node: str, version: int) -> None:
    """Takes a version out of service; its files stay.

    Raises:
        ServingError: it is not served.
    """
    server.unload_adapter(AdapterRegistry.served_name(node, version))
