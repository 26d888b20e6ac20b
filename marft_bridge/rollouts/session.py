"""A configuration, an app and base models -> the app's graph on the served models, recorded, ready to run episodes.

`collect`, `train` and `credit` run on one session each; a comparison opens several graphs on one stage itself.
Invariant: every node of the configuration has a version 0 before the first episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import Collector, HostedAnswers
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.graph_stage import Stage, open_stage
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.device_lines import announced_devices
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import ModelVersions
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.served_bases import ServedBases, serve_bases
from marft_bridge.serving.server_file import server_options


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSession:
    """Runs episodes of one app, until the block ends that opened it."""

    stage: Stage
    collector: Collector
    nodes: tuple[str, ...]  # the trained ones
    routed: tuple[str, ...]  # those that served models answer: the trained and the frozen ones
    reporter: Reporter

    def run(self, requests: Sequence[EpisodeRequest], title: str, reward: str, *, finished_before: int = 0) -> Tally:
        """Runs the requests, shows their progress, and reports failures, missing rewards and silent nodes.

        Args:
            finished_before: as of `Tally`.
        """
        tally = Tally(finished_before=finished_before)
        self.stage.run([(self.collector, request, tally) for request in requests], title, reward)
        for line in tally.lines(self.nodes):
            self.reporter.say(line)
        for line in self.collector.take_thread_lines():
            self.reporter.say(line)
        return tally

    def stop(self) -> None:
        """Ends the `run` of another thread."""
        self.stage.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(GraphSession):
    """On the configuration's models, until the block of `open_session` ends."""

    models: ServedBases


@contextmanager
def open_own_session(config: BridgeConfig, folder: RunFolder, app: App, reporter: Reporter) -> Iterator[GraphSession]:
    """Opens the app on the models that it was written with: no server of ours is started or asked.

    Raises:
        BridgeError: the app cannot be opened without a model, or one of its rewards needs a served one.
    """
    agents = (*app.nodes, *app.frozen)  # whose rewards keep their names
    with (
        open_stage(config, folder, reporter) as stage,
        stage.open_app(replace(app, nodes=agents, frozen=()), None, None) as collector,
    ):
        yield GraphSession(stage=stage, collector=collector, nodes=(), routed=(), reporter=reporter)


@contextmanager
def open_session(
    config: BridgeConfig,
    folder: RunFolder,
    app: App,
    versions: ModelVersions,
    reporter: Reporter,
    *,
    placement: Placement | None = None,
    hosted: HostedAnswers | None = None,
) -> Iterator[Session]:
    """Starts the servers of the base models, or attaches to those of `marft-bridge serve`, and opens the app.

    The frozen nodes are served at version 0 from the beginning.

    Args:
        placement: who takes which card, and which server is attached to; None plans it for a command that does not
            train.
        hosted: as of `Collector`.

    Raises:
        BridgeError: a server does not start; the app cannot be opened.
    """
    with open_stage(config, folder, reporter) as stage:
        options = placement.serve_options() if placement else server_options(versions.bases, folder, reporter)
        with serve_bases(
            config,
            versions,
            options,
            log_of=folder.server_log_of,
            loop=stage.loop,
            reporter=reporter,
            placement=placement,
            announce=partial(announced_devices, folder),
        ) as models:
            versions.register_zero((*config.graph.nodes, *app.frozen))
            models.publish(dict.fromkeys(app.frozen, 0))
            with stage.open_app(app, models, models.judge, hosted=hosted) as collector:
                yield Session(
                    models=models,
                    stage=stage,
                    collector=collector,
                    nodes=config.graph.nodes,
                    routed=(*config.graph.nodes, *app.frozen),
                    reporter=reporter,
                )
