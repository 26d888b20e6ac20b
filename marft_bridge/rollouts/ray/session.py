"""`train.rollouts = "ray"`: the rounds of `train` on workers that stay for the whole command, each with a model server.

Invariants: what cannot work there is refused before anything starts; the workers serve what the command published
last, as its own server would, before they get requests of it; no server of the command itself is started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.ray.collect import open_driver, refuse_unusable_config
from marft_bridge.rollouts.ray.driver import Driver
from marft_bridge.rollouts.ray.messages import AdapterFiles, NodeVersion
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import ModelVersions

OPTION = "train.rollouts"


def refuse_unusable_rollouts(config: BridgeConfig) -> None:
    """Refuses rollouts that cannot be played on a cluster, before anything starts.

    Raises:
        ConfigError: Ray is not installed, or a setting contradicts `train.rollouts = "ray"`.
        ClusterError: nothing answers at `ray.address`.
    """
    refuse_unusable_config(config, OPTION)
    if config.ray.endpoints:
        raise ConfigError(
            f"ray.endpoints: with {OPTION} = ray each worker starts a server of its own, which gets the versions of "
            "every round: leave it out"
        )
    for option, is_set, reason in (
        ("train.trees", config.train.trees is not None, "forks are played on the command's machine only"),
        ("train.hosted_answers", config.train.hosted_answers != "provider", "the recorded answers are there only"),
        ("train.teacher_rounds", config.train.asking_rounds > 0, "own models of nodes are asked there only"),
    ):
        if is_set:
            raise ConfigError(f"{option}: {reason}: leave it out, or leave {OPTION} at 'local'")
    if config.ray.gpus_per_worker and config.ray.address is None and config.train.trainer.system.device != "cpu":
        raise ConfigError(
            "ray.gpus_per_worker: on a cluster of this machine alone Ray would give workers the trainer's card: name a "
            f"cluster in ray.address, or leave {OPTION} at 'local'"
        )


@dataclass(slots=True)
class ClusterModels:
    """What the workers serve of the trained nodes; as much of `ServedBases` as training needs."""

    versions: ModelVersions
    driver: Driver
    served: frozenset[NodeVersion] = frozenset()

    def publish(self, versions: Mapping[str, int]) -> None:
        """Has the workers serve each node's version besides; a worker loads it before its next requests.

        What is served already changes nothing: a thread that plays rounds ahead may ask for it at any moment.
        """
        if not versions.items() <= self.served:
            self._serve(self.served | frozenset(versions.items()))

    def retire_all_but(self, kept_versions: Mapping[str, Sequence[int]]) -> None:
        """Has the workers take every other version of these nodes out of service."""
        self._serve(
            frozenset(
                (node, version)
                for node, version in self.served
                if node not in kept_versions or version in kept_versions[node]
            )
        )

    def asleep(self) -> AbstractContextManager[None]:
        """The servers are on other cards than the trainer: they stay awake."""
        return nullcontext()

    def _serve(self, served: frozenset[NodeVersion]) -> None:
        self.served = served
        self.driver.publish(sorted(served), self._read)

    def _read(self, key: NodeVersion) -> AdapterFiles:
        return AdapterFiles(*key, files=self.versions.registry.files(*key))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSession:
    """Runs episodes on the cluster, until the block of `open_cluster_session` ends; stands for a `Session`."""

    driver: Driver
    models: ClusterModels
    nodes: tuple[str, ...]  # the trained ones
    routed: tuple[str, ...]  # those that served models answer: the trained and the frozen ones
    reporter: Reporter

    def run(self, requests: Sequence[EpisodeRequest], title: str, reward: str, *, finished_before: int = 0) -> Tally:
        """Runs the requests, shows their progress, and reports failures, missing rewards and silent nodes.

        Args:
            finished_before: as of `Tally`.

        Raises: as `Driver.run`.
        """

        def show(done: int, tally: Tally) -> None:
            task.update(done, tally.figures(reward))

        with self.reporter.bars(), self.reporter.task(title, len(requests)) as task:
            tally = self.driver.run(requests, show, finished_before=finished_before)
        for line in tally.lines(self.nodes):
            self.reporter.say(line)
        return tally

    def stop(self) -> None:
        """Ends the `run` of another thread."""
        self.driver.stop()


@contextmanager
def open_cluster_session(
    config: BridgeConfig,
    folder: RunFolder,
    app: App,
    versions: ModelVersions,
    reporter: Reporter,
    *,
    taken_cards: Collection[str] = (),
) -> Iterator[ClusterSession]:
    """Connects to the cluster; the workers start with the first requests.

    Args:
        taken_cards: as of `open_driver`.

    Raises:
        ClusterError: the cluster cannot be reached or started.
    """
    routed = (*config.graph.nodes, *app.frozen)
    versions.register_zero(routed)
    location = config.ray.address or "on this machine"
    reporter.say(f"rollouts: {config.ray.workers} workers on Ray, {location}, each with a model server")
    with open_driver(config, folder, versions, notify=reporter.say, option=OPTION, taken_cards=taken_cards) as driver:
        yield ClusterSession(
            driver=driver,
            models=ClusterModels(versions, driver),
            nodes=config.graph.nodes,
            routed=routed,
            reporter=reporter,
        )
