"""`marft-bridge collect --engine ray`: the same requests as on one machine, run by workers on a Ray cluster.

Invariant: what cannot work there is refused before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.ray.connection import connect_ray, refuse_unusable_cluster
from marft_bridge.rollouts.ray.driver import Driver
from marft_bridge.rollouts.ray.messages import config_to_assign
from marft_bridge.rollouts.ray.worker import endpoint_to_options, refuse_server_without_card
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import ModelVersions
from marft_bridge.serving.served_bases import serve_bases
from trace_store.journal import Journal

_OPTION = "collect.engine"


def refuse_unusable_config(config: BridgeConfig, option: str = _OPTION) -> None:
    """Refuses a configuration that cannot work on a cluster, before anything starts.

    Args:
        option: which has the value "ray", for the message.

    Raises:
        ConfigError: Ray is not installed, or a setting contradicts the option.
        ClusterError: nothing answers at `ray.address`.
    """
    refuse_unusable_cluster(config.ray, option)
    if config.models and config.ray.endpoints:
        raise ConfigError("ray.endpoints are servers of one base model each; with [models] workers start their own")
    for name, model in config.models.items():
        if model.serve.attach is not None or model.serve.port is not None:
            setting = "attach" if model.serve.attach is not None else "port"
            raise ConfigError(f"models.{name}.serve.{setting}: with {option} = ray workers start servers of their own")
    if config.serve.attach is not None:
        advice = "use ray.endpoints" if option == _OPTION else "leave it out: workers start servers of their own"
        raise ConfigError(f"serve.attach names one server for one machine; with {option} = ray {advice}")
    if config.serve.port is not None and not config.ray.endpoints:
        raise ConfigError(f"serve.port: several workers may run on one machine; leave it out with {option} = ray")
    if config.ray.address is None:  # this machine is the whole cluster
        refuse_server_without_card(config.ray)


@contextmanager
def open_driver(
    config: BridgeConfig,
    folder: RunFolder,
    versions: ModelVersions,
    *,
    notify: Callable[[str], None],
    option: str = _OPTION,
    taken_cards: Collection[str] = (),
) -> Iterator[Driver]:
    """Connects to the cluster, for the driver of its workers, which start with the first requests.

    Args:
        taken_cards: that the command computes on itself, which no worker may have.

    Raises:
        ClusterError: the cluster cannot be reached or started.
    """
    journal, processors = Journal(folder.journal), config.ray.workers * config.ray.cpus_per_worker
    try:
        with (
            connect_ray(config.ray, option=option, processors=processors) as ray,
            Driver(
                ray,
                config.ray,
                config.ray.in_flight or config.collect.in_flight,
                assign=config_to_assign(config, versions.lineage, taken_cards),
                journal=journal,
                notify=notify,
            ) as driver,
        ):
            yield driver
    finally:
        journal.close()


def run_requests_on_ray(
    config: BridgeConfig,
    folder: RunFolder,
    app: App,
    versions: ModelVersions,
    reporter: Reporter,
    requests: Sequence[EpisodeRequest],
    finished_before: int,
) -> Tally:
    """Runs the requests on the cluster, all nodes at version 0, and shows their progress.

    Args:
        finished_before: as of `Tally`.

    Raises:
        BridgeError: see `Driver.run`; the cluster cannot be reached.
        StoreError: this machine's disk does not take the records.
    """
    _publish(config, folder, app, versions=versions, reporter=reporter)
    reporter.say(f"collecting with {config.ray.workers} workers on Ray, {config.ray.address or 'on this machine'}")

    def show(done: int, tally: Tally) -> None:
        task.update(done, tally.figures(config.train.trainer.reward))

    with (
        open_driver(config, folder, versions, notify=reporter.say) as driver,
        reporter.bars(),
        reporter.task("collect", len(requests)) as task,
    ):
        tally = driver.run(requests, show, finished_before=finished_before)
    for line in tally.lines(config.graph.nodes):
        reporter.say(line)
    return tally


def _publish(config: BridgeConfig, folder: RunFolder, app: App, versions: ModelVersions, reporter: Reporter) -> None:
    """Publishes version 0 of every node on every shared server."""
    if not config.ray.endpoints:
        return
    nodes = (*config.graph.nodes, *app.frozen)
    versions.register_zero(nodes)
    with asyncio.Runner() as loop:
        for endpoint in config.ray.endpoints:
            options = [endpoint_to_options(config, endpoint)]
            with serve_bases(
                config, versions, options, log_of=folder.server_log_of, loop=loop, reporter=reporter
            ) as models:
                models.publish(dict.fromkeys(nodes, 0))
