"""Followers on a Ray cluster: one actor in one bundle of a placement group for each learner but the first.

Invariants: what a machine lacks is one line before a model server is started; this process is met at its own address in
the cluster, and a group of this machine at loopback; actors and placement group end with this object.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ClusterError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.ray import RayOptions
from marft_bridge.devices.card_names import names_to_uuids
from marft_bridge.rollouts.ray.connection import (
    bundle_to_strategy,
    connect_ray,
    error_to_text,
    last_line,
    resources_to_text,
)
from marft_bridge.rollouts.ray.driver import remember_interrupts
from marft_bridge.rollouts.ray.messages import code_sha256
from marft_bridge.serving.model_versions import ModelVersions
from marft_bridge.training.learner_actor import LearnerActor, LearnerNeeds, Location, folder_to_sha256
from marft_bridge.training.learners import LearnerEnd, LostLearnerError, to_own_system
from trainers import checkpoint
from trainers.common.files import weights_to_sha256
from trainers.config import TrainerOptions
from trainers.learners.leader import options_to_values

OPTION = "train.engine"
_NOTICE_S = 60.0  # in which Ray notices that a machine is gone
_STOP_S = 5.0  # for those that were let go


@dataclass(slots=True)
class _Follower:
    """This process's record of one actor."""

    rank: int
    actor: Any
    name: str
    location: Location | None = None
    end_ref: Any = None  # Ray's reference to how `follow` ends


class RayLearners:
    """See `learners.Followers`.

    Args:
        devices: where each learner computes, by rank, as its own process calls it.
        needs: what each must find.
        taken_cards: the cards of this machine that the command uses itself, as CUDA_VISIBLE_DEVICES calls them.
    """

    wait_from_start = False

    def __init__(
        self,
        options: RayOptions,
        devices: Collection[str],
        *,
        needs: Callable[[], LearnerNeeds],
        taken_cards: Collection[str],
        notify: Callable[[str], None],
    ) -> None:
        self._options, self._devices, self._needs = options, tuple(devices), needs
        self._taken_cards, self._notify = frozenset(taken_cards), notify
        self._followers: list[_Follower] = []
        self._stack = ExitStack()
        self._ray: Any = None
        self._store: Any = None
        self._host = ""

    def start(self) -> None:
        """Places the actors, which import what they need, and has each check its machine.

        Raises:
            ClusterError: the cluster cannot be reached, has no room, or a machine lacks something.
            LostLearnerError: one was lost meanwhile.
        """
        count = len(self._devices) - 1
        self._ray = self._stack.enter_context(connect_ray(self._options, option=OPTION, processors=count))
        self._host = self._ray.util.get_node_ip_address()
        group = self._place_group(count)
        for rank in range(1, count + 1):
            actor = self._actor_class(group, rank - 1).remote(self._folder())
            self._followers.append(_Follower(rank, actor, f"learner {rank} of {count + 1}"))
        for follower, location in self._ask_all("locate", self._host):
            follower.location = location
            follower.name = f"{follower.name} ({location.process})"
        self._refuse_taken_cards()
        devices, sharers, needs = self._devices, self.count_sharers(), self._needs()
        refs = [
            (f, f.actor.check.remote(needs, devices[f.rank], sharers[f.rank], learners=len(sharers)))
            for f in self._followers
        ]
        self._refuse_failed(refs)
        machines = len({self._host, *(f.location.host for f in self._followers if f.location is not None)})
        self._notify(
            f"learners: {count} on Ray, {self._options.address or 'on this machine'}, beside this process, on "
            f"{machines} machine{'s' if machines > 1 else ''}"
        )

    def count_sharers(self) -> list[int]:
        """By rank; machines are told apart by their addresses in the cluster."""
        hosts = [self._host, *(f.location.host for f in self._followers if f.location is not None)]
        counts = Counter(hosts)
        return [counts[host] for host in hosts]

    def join(self) -> None:
        """Is met by them at this machine's address, and joins them as the first.

        Raises:
            ClusterError: one cannot reach this machine.
            LostProcessError: one did not come.
        """
        from trainers.learners.group import join_group_at, listen_at

        count = len(self._devices)
        self._store = listen_at(self._host, count)
        port = self._store.port
        self._refuse_failed([(f, f.actor.connect.remote(self._host, port, count)) for f in self._followers])
        for follower in self._followers:
            follower.end_ref = follower.actor.follow.remote(follower.rank, count)
        join_group_at(0, count, store=self._store, own_host=self._host)

    def end(self) -> None:
        """Ends actors, placement group and connection."""
        end_refs = [follower.end_ref for follower in self._followers if follower.end_ref is not None]
        if end_refs:  # those that were let go leave the group by themselves
            self._ray.wait(end_refs, num_returns=len(end_refs), timeout=_STOP_S)
        for follower in self._followers:
            self._ray.kill(follower.actor)
        self._stack.__exit__(*sys.exc_info())  # what Ray logged is kept where the cluster failed
        self._store = None

    def first_end(self) -> LearnerEnd | None:
        """Which of them died, or ended with an error of its own; those that only noticed it count last."""
        deadline, witness = time.monotonic() + _NOTICE_S, None
        errors = self._ray.exceptions
        deaths = (errors.RayActorError, errors.NodeDiedError, errors.WorkerCrashedError, errors.OutOfMemoryError)
        pending = [follower for follower in self._followers if follower.end_ref is not None]
        while pending and time.monotonic() < deadline:
            ready, _ = self._ray.wait([f.end_ref for f in pending], num_returns=1, timeout=1.0)
            for follower in [f for f in pending if f.end_ref in ready]:
                pending.remove(follower)
                try:
                    failure = self._ray.get(follower.end_ref)
                except errors.RayTaskError as error:  # our own error, which another one would meet again
                    return LearnerEnd(f"{follower.name} ended: {last_line(error)}")
                except deaths as error:
                    return LearnerEnd(f"{follower.name} died: {error_to_text(error)}", may_be_replaced=True)
                except errors.RayError as error:
                    return LearnerEnd(f"{follower.name} ended: {error_to_text(error)}")
                if failure is not None and not failure.is_lost:
                    return LearnerEnd(f"{follower.name} ended: {failure.text}")
                if failure is not None:
                    witness = LearnerEnd(f"{follower.name} ended: {failure.text}", may_be_replaced=True)
        return witness

    # -- the pieces -------------------------------------------------------------------------------------------

    def _folder(self) -> str | None:
        return None if self._options.working_dir is not None else str(Path.cwd())

    def _bundle(self) -> dict[str, float]:
        # on this machine the plan of the cards says who has which; on a cluster Ray does
        return {"CPU": 1.0, "GPU": 1.0} if self._is_on_cards() and self._options.address is not None else {"CPU": 1.0}

    def _is_on_cards(self) -> bool:
        return self._devices[0] != "cpu"

    def _place_group(self, count: int) -> Any:
        """A bundle for each: cards close together, since gradients go between them; else spread, for the processors."""
        bundle, strategy = self._bundle(), "PACK" if self._is_on_cards() else "SPREAD"
        group = self._ray.util.placement_group([bundle] * count, strategy=strategy)
        self._stack.callback(self._ray.util.remove_placement_group, group)
        deadline = time.monotonic() + self._options.start_timeout_s
        with remember_interrupts() as check:
            while not group.wait(min(1.0, self._options.start_timeout_s)):
                check()
                if time.monotonic() >= deadline:
                    resource_text = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
                    raise ClusterError(
                        f"no room for {count} learners after {self._options.start_timeout_s:g} s "
                        f"(ray.start_timeout_s); the cluster has {resources_to_text(self._ray)}, and each asks for "
                        f"{resource_text}"
                    )
        return group

    def _actor_class(self, group: Any, bundle_index: int) -> Any:
        bundle = self._bundle()
        return self._ray.remote(LearnerActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=bundle_to_strategy(group, bundle_index),
        )

    def _ask_all(self, method: str, *arguments: Any) -> list[tuple[_Follower, Any]]:
        refs = [(follower, getattr(follower.actor, method).remote(*arguments)) for follower in self._followers]
        return [(follower, self._get(follower, ref)) for follower, ref in refs]

    def _refuse_failed(self, refs: list[tuple[_Follower, Any]]) -> None:
        for follower, ref in refs:
            if (text := self._get(follower, ref)) is not None:
                raise ClusterError(f"{follower.name}: {text}")

    def _get(self, follower: _Follower, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayActorError as error:
            if error.actor_init_failed:
                raise ClusterError(
                    f"{follower.name} could not be made where Ray put it: {last_line(error)}; every machine of the "
                    "cluster needs marft-bridge in the Python that Ray was started with"
                ) from error
            raise LostLearnerError(f"{follower.name} died: {error_to_text(error)}") from error
        except errors.RayError as error:
            raise ClusterError(f"{follower.name}: {error_to_text(error)}") from error

    def _refuse_taken_cards(self) -> None:
        """On a cluster Ray gives out cards of this machine too, and knows nothing of those that the command uses."""
        if self._options.address is None:
            return
        taken_cards = names_to_uuids(self._taken_cards)
        for follower in self._followers:
            location = follower.location
            if location is None or location.host != self._host or not self._is_on_cards():
                continue
            if shared := sorted(taken_cards & set(location.cards)):
                raise ClusterError(
                    f"{follower.name} was given card {shared[0]} of this machine, which the command uses itself: start "
                    "Ray here with a CUDA_VISIBLE_DEVICES that leaves it out, or with --num-gpus=0"
                )


def devices_on_cluster(options: TrainerOptions, learners: int) -> list[str]:
    """Where each learner computes, by rank: the command on its own device, the others on what Ray gives them.

    Args:
        options: the command's own.
    """
    from trainers.checks.memory_guard import options_to_device

    device = options_to_device(options)
    if device.type == "cpu":
        return ["cpu"] * learners
    return [f"cuda:{device.index or 0}", *["cuda:0"] * (learners - 1)]


def config_to_needs(
    config: BridgeConfig,
    versions: ModelVersions,
    *,
    options: TrainerOptions,
    devices: Collection[str],
    checkpoint_dir: Path,
    teacher_dir: Path | None,
) -> LearnerNeeds:
    """What a follower must find.

    Args:
        options: the trainer's.
        devices: of all learners, by rank.
        teacher_dir: the model that scores; None without one.
    """
    options = to_own_system(options, tuple(devices))
    model_dirs = {node: str(versions.base_of(node).directory.absolute()) for node in config.graph.nodes}
    weights = {
        folder: versions.lineage.get(f"base/{node}", versions.lineage["base"]) for node, folder in model_dirs.items()
    }
    teacher = None if teacher_dir is None else str(teacher_dir.absolute())
    if teacher_dir is not None and teacher is not None:
        weights[teacher] = weights_to_sha256(teacher_dir)
    saved = None
    if checkpoint.is_saved(checkpoint_dir):
        saved = (str(checkpoint_dir.absolute()), folder_to_sha256(checkpoint_dir))
    values = options_to_values(options)
    return LearnerNeeds(values, model_dirs, weights, teacher_dir=teacher, checkpoint=saved, code=code_sha256())
