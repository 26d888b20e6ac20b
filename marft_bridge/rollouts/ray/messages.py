"""The messages between the Ray driver and its workers, and the digests by which a worker is checked before it starts.

Invariant: a worker runs with the configuration, the code and the base model of the driver, or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.devices.card_names import names_to_uuids
from marft_bridge.rollouts.episode_plan import Key
from marft_bridge.rollouts.run_counts import Tally


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker needs to start."""

    number: int
    config: Mapping[str, Any]  # the options that the user set, as `BridgeConfig` reads them
    folder: str | None  # to work in; None: the folder that Ray put the worker in
    endpoint: str | None  # of the model server; None: the worker starts its own
    digests: Mapping[str, str]  # the driver's, of `config_to_digests`
    taken_cards: tuple[str, ...] = ()  # that the command computes on itself, by `names_to_uuids`


NodeVersion = tuple[str, int]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A version of a node as the driver registered it, on its way through Ray's object store."""

    node: str
    version: int
    files: Mapping[str, bytes]  # of `AdapterRegistry.files`


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's answer to one `exchange`: its state, and what is new since the last one."""

    phase: str  # "starting" | "working" | "ended"
    location: str  # host and process, for people
    lines: bytes = b""  # whole lines of its journal, from the requested offset
    end: int = 0  # the offset after them
    ended: tuple[Key, ...] = ()  # requests whose last attempt is over, and all of whose records have been sent
    tally: Tally = field(default_factory=Tally)  # of the list of requests with this number
    list_number: int = 0
    failure: tuple[str, str] | None = None  # class name and message of the error that ended its work
    losses: str = ""


def config_to_assign(
    config: BridgeConfig, lineage: Mapping[str, str], taken_cards: Collection[str] = ()
) -> Callable[[int], Assignment]:
    """A function from a worker's number, from 1, to its assignment, in the folder that this command works in.

    Args:
        lineage: as of `config_to_digests`.
        taken_cards: that the command computes on itself, as CUDA_VISIBLE_DEVICES calls them.
    """
    digests, endpoints = config_to_digests(config, lineage), config.ray.endpoints
    taken = tuple(sorted(names_to_uuids(taken_cards)))
    content = config.model_dump(mode="json", exclude_unset=True)
    folder = None if config.ray.working_dir is not None else str(Path.cwd())

    def assign(number: int) -> Assignment:
        endpoint = endpoints[(number - 1) % len(endpoints)] if endpoints else None
        return Assignment(number, content, folder, endpoint=endpoint, digests=digests, taken_cards=taken)

    return assign


def config_to_digests(config: BridgeConfig, lineage: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 digests of what the driver and a worker must share, by a name for people.

    Args:
        lineage: of the base models, as `ModelVersions.lineage`.
    """
    content = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return {
        "configuration": hashlib.sha256(content.encode()).hexdigest(),
        "code of marft-bridge": code_sha256(),
        "base model": lineage["base"],
        **{f"base model of {name[5:]}": digest for name, digest in lineage.items() if name.startswith("base/")},
    }


def digest_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """A phrase for each digest that differs."""
    return [
        f"the {subject} differs ({ours[subject][:12]} here, {theirs.get(subject, 'none')[:12]} there)"
        for subject in ours
        if ours[subject] != theirs.get(subject)
    ]


@functools.cache
def code_sha256() -> str:
    """The digest over the names and contents of all source files of the installed packages."""
    digest = hashlib.sha256()
    for package in ("marft_bridge", "trace_store", "trainers"):
        root = Path(sys.modules[package].__path__[0])
        for path in sorted(root.rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()
