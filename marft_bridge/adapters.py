"""A trained adapter folder -> a registered version of a node -> a name that the model server answers to.

Layout: root/<node>/<version>/ with the adapter's own two files and `marft.json`, which is written last: a folder
without it is what an interrupted run left. Invariants: a registered version never changes (its hash is checked when
it is published); a served name means one version of one node for ever; versions of another base model are refused.
It does not know how adapters are trained.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from marft_bridge.adapter_files import CONFIG_FILE, WEIGHTS_FILE, check_files, folder_to_hashes
from marft_bridge.errors import ServingError
from marft_bridge.files import write_atomically
from marft_bridge.serving import ModelServer
from trace_store.records import AdapterRow

_RECORD = "marft.json"
_NO_OTHERS: Mapping[str, str] = MappingProxyType({})
_CONFIG_SHA256 = "config_sha256"  # in the record only; one written before this was kept has none


def safe_node_name(node: str) -> str:
    """A node name, subgraph path included, as one folder name and as part of a served name.

    Letters, digits, `_` and `-` stay; any other byte of the UTF-8 form becomes `.` and two hex digits. Two nodes
    never share a name: "team/planner" is "team.2Fplanner", and a "." is ".2E".
    """
    if not node:
        raise ServingError("a node without a name has no adapter")
    return "".join(
        chr(byte) if re.match(rb"[A-Za-z0-9_-]", bytes([byte])) else f".{byte:02X}" for byte in node.encode()
    )


class AdapterRegistry:
    """The adapter versions under one folder.

    Args:
        root: is made when it is missing, 0700.
        base_sha256: of the base model's weights that these adapters belong to.
        others: the same of the nodes that run on another base model.
    """

    def __init__(self, root: Path, base_sha256: str, others: Mapping[str, str] = _NO_OTHERS) -> None:
        self.root = root
        self._base_sha256, self._others = base_sha256, others

    def base_of(self, node: str) -> str:
        """SHA-256 of the weights of the base model that a node runs on."""
        return self._others.get(node, self._base_sha256)

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
        if (folder / _RECORD).exists():
            raise ServingError(f"node {node!r} already has adapter v{version}; a version is never overwritten")
        if folder.exists():
            shutil.rmtree(folder)  # of an interrupted run: without a record nobody was told of it
        for part in (self.root, folder.parent, folder):
            part.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def register(self, node: str, version: int, parent: int | None, metrics: Mapping[str, Any]) -> AdapterRow:
        """Make the files in the version's folder a version.

        Args:
            parent: the version it was trained from, None for the first.
            metrics: JSON values.

        Raises:
            ServingError: the folder has no weights, the version exists, or the parent does not.
        """
        folder = self._folder(node, version)
        if (folder / _RECORD).exists():
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
            file.chmod(0o600)
        content = record | {_CONFIG_SHA256: hashes.get(CONFIG_FILE)}
        write_atomically(folder / _RECORD, json.dumps(content, indent=2, allow_nan=False) + "\n")
        return AdapterRow(path=str(folder), **record)

    def get(self, node: str, version: int) -> AdapterRow:
        """One registered version.

        Raises:
            ServingError: there is no such version, its record is unreadable, or it belongs to another base model.
        """
        folder = self._folder(node, version)
        try:
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            record.pop(_CONFIG_SHA256, None)
            row = AdapterRow(path=str(folder), **record)
        except FileNotFoundError:
            published = ", ".join(f"v{known}" for known in self.versions(node)) or "none"
            raise ServingError(f"node {node!r} has no adapter v{version}; published: {published}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ServingError(f"{str(folder / _RECORD)!r} is unreadable ({error}); delete that version") from error
        if row.base_sha256 != (base := self.base_of(node)):
            raise ServingError(
                f"adapter v{version} of node {node!r} was trained on another base model "
                f"({row.base_sha256[:12]}, not {base[:12]}); use that model or another run folder"
            )
        return row

    def hashes(self, node: str, version: int) -> dict[str, str]:
        """File name -> SHA-256 that it had when the version was registered. Raises as `get`."""
        row = self.get(node, version)
        config = json.loads((Path(row.path) / _RECORD).read_text(encoding="utf-8")).get(_CONFIG_SHA256)
        return {WEIGHTS_FILE: row.sha256} | ({CONFIG_FILE: config} if config is not None else {})

    def latest(self, node: str) -> AdapterRow | None:
        """The highest version of a node; None when it has none and runs on the base model."""
        versions = self.versions(node)
        return self.get(node, versions[-1]) if versions else None

    def versions(self, node: str) -> list[int]:
        """Registered versions of a node, ascending."""
        records = (self.root / safe_node_name(node)).glob(f"*/{_RECORD}")
        return sorted(int(record.parent.name) for record in records if record.parent.name.isdecimal())

    def _folder(self, node: str, version: int) -> Path:
        if version < 0:
            raise ServingError(f"node {node!r} has no adapter v{version}: versions count from 0")
        return self.root / safe_node_name(node) / str(version)


def publish(server: ModelServer, registry: AdapterRegistry, node: str, version: int) -> str:
    """Have the server answer to this version; returns its served name. Does nothing when it is served already.

    Raises:
        ServingError: no such version, its files are not those that were registered, the server refuses it, or
            another folder is served under its name.
    """
    row, hashes = registry.get(node, version), registry.hashes(node, version)
    name = registry.served_name(node, version)
    folder = Path(row.path).resolve()
    if name in server.adapters():
        check_files(folder, hashes)
    else:
        server.load_adapter(name, folder, hashes)
    served = server.adapters().get(name)
    if served is None or Path(served) != folder:
        raise ServingError(f"the model server serves {served or 'nothing'} as {name!r}, not {str(folder)!r}")
    return name


def retire(server: ModelServer, node: str, version: int) -> None:
    """Take a version out of service; its files stay.

    Raises:
        ServingError: it is not served.
    """
    server.unload_adapter(AdapterRegistry.served_name(node, version))
