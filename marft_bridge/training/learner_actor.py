"""A follower on a Ray cluster: it says where it is, checks what it finds there, joins the group, and follows.

Invariant: it learns with the code, the base models and the checkpoint of the command, or not at all. Ray runs it as an
actor, and is not imported.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import USER_ERRORS
from marft_bridge.devices.card_names import names_to_uuids, visible_names
from marft_bridge.rollouts.ray.messages import code_sha256
from trainers.common.card_order import count_cards_as_driver


@dataclass(frozen=True, slots=True)
class LearnerNeeds:
    """What every learner must find on its machine; paths are absolute."""

    options: Mapping[str, Any]  # JSON values, as `TrainerOptions` reads them
    model_dirs: Mapping[str, str]  # by agent
    weights: Mapping[str, str]  # folder of base model or scoring teacher -> SHA-256 of its weights
    teacher_dir: str | None
    checkpoint: tuple[str, str] | None  # its folder and SHA-256; None for a run that begins
    code: str  # `code_sha256`


@dataclass(frozen=True, slots=True)
class Location:
    """Where a follower is."""

    host: str  # the address of its machine that the command's machine is reached from
    process: str  # for people
    cards: tuple[str, ...]  # that it may use, by `names_to_uuids`


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a follower ended by itself."""

    text: str
    is_lost: bool  # because another process did


class LearnerActor:
    """The methods that the command calls, in this order.

    Args:
        folder: to work in; None where Ray has put this process into the folder that was sent.
    """

    def __init__(self, folder: str | None) -> None:
        count_cards_as_driver()  # as the command, whose plan names a card; Ray numbers cards by this environment
        self._folder, self._host = folder, ""
        self._store: Any = None  # torch's, once this is connected

    def locate(self, leader_host: str) -> Location:
        """Where this is, seen from the command's machine."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((leader_host, 9))  # sends nothing; the kernel says which address it would send from
            self._host = probe.getsockname()[0]
        process = f"{socket.gethostname()}, process {os.getpid()}"
        return Location(self._host, process, tuple(sorted(names_to_uuids(visible_names(os.environ)))))

    def check(self, needs: LearnerNeeds, device: str, sharers: int, *, learners: int) -> str | None:
        """What is wrong with this machine; None when nothing is.

        Args:
            device: where this learner will compute.
            sharers: learners in this machine's memory, where they compute on the CPU.
            learners: all of them.
        """
        try:
            if self._folder is not None:
                os.chdir(self._folder)
            return _find_difference(needs) or _find_missing_memory(needs, device, sharers, learners=learners)
        except OSError as error:
            return (
                f"cannot read {error.filename!r}: {error.strerror}; every machine of the cluster needs it under the "
                "same path"
            )
        except USER_ERRORS as error:
            return str(error)

    def connect(self, host: str, port: int, count: int) -> str | None:
        """Connects to where the command is met; why that is impossible, or None."""
        from trainers.learners.group import connect_to

        try:
            self._store = connect_to(host, port, count)
        except USER_ERRORS as error:
            return f"cannot reach port {port} of {host}, the command's machine: {error}"
        return None

    def follow(self, rank: int, count: int) -> Failure | None:
        """Joins the group and follows until the command lets go; why it ended before, or None."""
        from trainers.errors import LostProcessError
        from trainers.learners.follower import follow
        from trainers.learners.group import break_off_group, join_group_at, leave_group

        assert self._store is not None
        try:
            join_group_at(rank, count, store=self._store, own_host=self._host)
            follow()
            leave_group()
        except USER_ERRORS as error:
            return Failure(str(error), isinstance(error, LostProcessError))
        finally:
            break_off_group()  # Ray keeps this process, whose open connections the others would wait for
        return None


def folder_to_sha256(folder: Path) -> str:
    """The digest over names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        with path.open("rb") as stream:
            total.update(path.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _find_difference(needs: LearnerNeeds) -> str | None:
    from trainers.common.files import weights_to_sha256

    if needs.code != code_sha256():
        return "the code of marft-bridge differs from the command's; install the same on every machine of the cluster"
    for folder, digest in needs.weights.items():
        if weights_to_sha256(Path(folder)) != digest:
            return f"the weights in {folder} differ from those on the command's machine"
    if needs.checkpoint is not None:
        folder, digest = needs.checkpoint
        if folder_to_sha256(Path(folder)) != digest:
            return f"the checkpoint {folder} differs from that on the command's machine"
    return None


def _find_missing_memory(needs: LearnerNeeds, device: str, sharers: int, *, learners: int) -> str | None:
    from trainers.checks.memory_guard import MemoryGuard
    from trainers.config import TrainerOptions

    model_dirs = {agent: Path(folder) for agent, folder in needs.model_dirs.items()}
    options = TrainerOptions.model_validate(needs.options)
    options = options.model_copy(update={"system": options.system.model_copy(update={"device": device})})
    guard = MemoryGuard.of_agents(options, model_dirs, list(model_dirs), sharers=sharers, learners=learners)
    guard.check()
    if needs.teacher_dir is not None:
        guard.check_teacher(Path(needs.teacher_dir))
    return None
