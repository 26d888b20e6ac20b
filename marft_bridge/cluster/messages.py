"""What a driver and its workers tell each other, and what they must agree on before they start.

Invariant: a worker runs with the configuration, the code and the base model of the driver, or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import graphs
import marft_bridge
import trace_store
import trainers
from marft_bridge.config import BridgeConfig
from marft_bridge.tally import Tally

Key = tuple[str, int, str | None, int | None]
"""`EpisodeRequest.key`."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is hired for."""

    number: int
    config: Mapping[str, Any]  # what the user set, as `BridgeConfig` reads it
    folder: str | None  # to work in; None: where the worker is
    endpoint: str | None  # of the model server; None: the worker starts its own
    agreed: Mapping[str, str]  # as `agreement` tells it


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has to tell since the last time."""

    phase: str  # "starting" | "working" | "ended"
    place: str  # host and process, for people
    lines: bytes = b""  # whole lines of its journal, from the offset that was asked for
    end: int = 0  # the offset after them
    ended: tuple[Key, ...] = ()  # requests whose last attempt is over, and whose records have all been sent
    tally: Tally = field(default_factory=Tally)
    failure: tuple[str, str] | None = None  # class and message of what ended its work
    losses: str = ""


def agreement(config: BridgeConfig, lineage: Mapping[str, str]) -> dict[str, str]:
    """What -> its SHA-256, for the driver and a worker to compare.

    Args:
        lineage: of the base models.
    """
    said = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return {
        "configuration": hashlib.sha256(said.encode()).hexdigest(),
        "code of marft-bridge": code_sha256(),
        "base model": lineage["base"],
        **{f"base model of {name[5:]}": digest for name, digest in lineage.items() if name.startswith("base/")},
    }


def disagreements(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """A phrase for each thing that differs."""
    return [
        f"the {what} differs ({ours[what][:12]} here, {theirs.get(what, 'none')[:12]} there)"
        for what in ours
        if ours[what] != theirs.get(what)
    ]


@functools.cache
def code_sha256() -> str:
    """Of every source file of the four packages, by its name in them."""
    digest = hashlib.sha256()
    for package in (graphs, marft_bridge, trace_store, trainers):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()
