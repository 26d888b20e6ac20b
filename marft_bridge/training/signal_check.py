"""Collected episodes, then each round -> training goes on, or ends with one line because its rewards teach nothing.

Invariants: a run is refused before a server is started; what rounds have learned stays when training ends for lack of
signal; whoever said `--without-signal` once is not stopped, also after --resume, since the line of the forecast in
metrics.jsonl keeps it. What the figures and the threshold are is `forecast`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from marft_bridge.common.errors import NoSignalError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, TrainOptions
from marft_bridge.runs.run_folder import FORECAST, RunFolder, read_forecast, read_metrics, write_metrics
from marft_bridge.training.forecast import (
    FIRST_ROUNDS,
    FLAG,
    Forecast,
    earn_differently,
    forecast_to_advice,
    forecast_to_lines,
    forecast_to_refusal,
    penalties_to_lines,
    trajectories_to_forecast,
)
from trace_store.records import Trajectory


def check_forecast(
    config: BridgeConfig,
    collected: Sequence[Trajectory],
    own_ids: Collection[str],
    *,
    resume: bool,
    without_signal: bool,
    reporter: Reporter,
) -> SignalCheck:
    """Says and records what the rounds can expect to learn from, and refuses a run that would learn nothing.

    A run that is resumed was let through before: nothing is said or refused again. Nor is one refused whose rounds
    begin from another run's adapters, by what the base model earned.

    Args:
        own_ids: of the episodes that this run collected; the others came from `train.traces`.

    Raises:
        NoSignalError: the rounds would probably teach nothing, and nobody said to go on all the same.
    """
    path = RunFolder(config.run_folder).metrics
    earlier = read_forecast(path) if resume else None
    goes_on = without_signal or bool(earlier and earlier["without_signal"])
    forecast = trajectories_to_forecast(collected, own_ids, config.graph.nodes, options=config.train)
    lines = [*forecast_to_lines(forecast), *penalties_to_lines(config.train.trainer)]
    record = {"phase": FORECAST, "round": 0, "lines": lines, **asdict(forecast), "without_signal": goes_on}
    write_metrics(path, forecast=record, updates=read_metrics(path))
    if not resume:
        for line in lines:
            reporter.say(line)
        refusal = forecast_to_refusal(forecast)
        if refusal is not None and not goes_on and config.train.start_from is None:
            raise NoSignalError(refusal)
    others = [t for t in collected if t.episode.episode_id not in own_ids]
    return SignalCheck(
        forecast,
        config.graph.nodes,
        config.train,
        goes_on=goes_on,
        best_of_others=max(_rewards(others, config.train), default=None),
    )


@dataclass(frozen=True, slots=True)
class SignalCheck:
    """Whether rounds teach anything. `goes_on`: training is not ended where they do not."""

    forecast: Forecast
    nodes: tuple[str, ...]
    options: TrainOptions
    goes_on: bool
    best_of_others: float | None = None  # team reward of a run that was imitated: this app did not run it

    def has_signal(self, metrics: Mapping[str, Any], episodes: Sequence[Trajectory]) -> bool:
        """Whether the rewards of a round moved an adapter.

        They did not where what was compared earned the same (what moves adapters then is no reward: entropy, KL), or
        where no adapter took a step. An estimator with groups says itself whether one of them holds two that differ;
        successes of before that are in no group count for what they earned. Without groups episodes are
        compared; a running mean of earlier rounds that nothing normalises is moved by any reward. A step that the KL
        stop kept away had its signal; so has an agent that is alone in its turn (`alternating`) and learns nothing
        from it.

        Args:
            metrics: what `MarftTrainer.update` returned of the round.
            episodes: those it was given, older ones included.
        """
        trainer, flat_groups = self.options.trainer, metrics["critic"]["flat_groups"]
        joined = trainer.replay.successes > 0 and metrics.get("replayed", 0) > 0
        if flat_groups == 1 and not joined:
            return False
        remembers = trainer.advantage.estimator_class.keeps_state and trainer.advantage.normalization == "none"
        if (flat_groups in (None, 1) and not remembers) and not earn_differently(episodes, trainer):
            return False
        stepped = any(agent.get("steps") or agent.get("stopped_early") for agent in metrics["agents"].values())
        return stepped or trainer.objective.update == "alternating"

    def refuse_silence(self, updates: Sequence[Mapping[str, Any]], episodes: Sequence[Trajectory]) -> None:
        """Ends training after two rounds in a row without signal, but where all is learned.

        That is where every episode of the last round earned the best that was collected, and something collected less;
        or as much as the best run that was imitated, and more than nothing.

        Args:
            updates: the lines of metrics.jsonl, the last round's included.
            episodes: the fresh ones of the last round.

        Raises:
            NoSignalError: the message says what to do; the checkpoint and the adapters are whole.
        """
        last_updates = [line for line in updates if line["round"] > 0][-FIRST_ROUNDS:]
        is_silent = len(last_updates) == FIRST_ROUNDS and not any(line.get("signal", True) for line in last_updates)
        if self.goes_on or not is_silent or self._is_solved(episodes):
            return
        own_ids = {trajectory.episode.episode_id for trajectory in episodes}
        last_round = trajectories_to_forecast(episodes, own_ids, self.nodes, options=self.options)
        first, last = (line["round"] for line in last_updates)
        raise NoSignalError(
            f"train: rounds {first} and {last} taught nothing: the runs that were compared earned the same, or nearly "
            f"so; {forecast_to_advice(last_round)}; what was trained before is kept; or go on all the same with "
            f"--resume {FLAG}"
        )

    def _is_solved(self, episodes: Sequence[Trajectory]) -> bool:
        rewards = _rewards(episodes, self.options)
        lowest, highest = self.forecast.lowest, self.forecast.highest
        if not rewards:
            return False
        if self.best_of_others is not None and 0 < self.best_of_others <= min(rewards):
            return True
        return lowest is not None and highest is not None and lowest < highest <= min(rewards)


def _rewards(episodes: Sequence[Trajectory], options: TrainOptions) -> list[float]:
    return [reward for t in episodes if (reward := t.team_reward(options.trainer.reward)) is not None]
