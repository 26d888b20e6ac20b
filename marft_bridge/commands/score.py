"""`marft-bridge score`: stored episodes -> rewards as they are declared now, without running anything again.

New rewards are added, with a source that begins with `score:` and the current time; of several rewards with one name
the latest counts, and none is deleted. Invariants: a reward that reads the final state of the graph, which is not
stored, is named and left as it was; an episode that did not come to its end is left out, and counted, but for
one that a limit cut short where `graph.limit_reward` says what that is worth; an episode's spans are released once its
rewards are written. The store is only open while episodes are read and at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from marft_bridge.common.errors import ConfigError, EpisodesFailedError, RewardFailedError
from marft_bridge.common.progress import Reporter
from marft_bridge.common.run_limits import is_limit
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rewards.contract import RewardEnvironment, RunView
from marft_bridge.rewards.limit_reward import LimitReward
from marft_bridge.rewards.scoring import FUNCTION, Score, Scorer
from marft_bridge.rollouts.app import load_reward
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.runs.run_store import WAIT_S, open_run_store, take_in_journal
from trace_store.journal import Journal
from trace_store.records import RESCORED, Trajectory
from trace_store.store import TraceStore

PAGE = 256  # episodes in memory at a time, at most
MAX_SHOWN = 4  # rewards whose mean fits the progress line

_FROM_OURS = "FROM episodes e JOIN runs r USING (run_id) WHERE r.command IN ('collect', 'train', 'compare', 'fork')"
_EPISODES = f"SELECT e.episode_id {_FROM_OURS} AND e.outcome = 'terminated' ORDER BY e.started_ns, e.episode_id"
_UNFINISHED = (
    f"SELECT e.episode_id, e.outcome, e.reason {_FROM_OURS} AND e.outcome <> 'terminated' "
    "ORDER BY e.outcome DESC, e.started_ns, e.episode_id"
)


def score(config: BridgeConfig, only: Sequence[str], reporter: Reporter) -> None:
    """Adds the rewards of `config` to every episode of the run folder, and prints a summary.

    Args:
        only: names of declared rewards, or `graph.reward`; none means all.

    Raises:
        BridgeError, StoreError: see the messages; rewards that were written before are kept.
    """
    folder = RunFolder(config.run_folder)
    folder.require_store("score")
    scorer = _scorer(config)
    try:
        scorer.refuse_unknown(only)
    except ConfigError as error:
        raise ConfigError(f"score --only: {error}") from None
    with folder.lock_for("score"):
        with open_run_store(folder, reporter) as store:
            episodes = [str(row[0]) for row in store.sql(_EPISODES)]
            cut_scores, left_out = _unfinished_to_scores(store, _selected_limit_reward(config, only))
        summary = _Summary(left_out)
        folder.record_config("score", config)
        try:
            _score_all(
                scorer,
                folder,
                episodes,
                cut_scores=cut_scores,
                only=only,
                in_flight=config.collect.in_flight,
                summary=summary,
                reporter=reporter,
            )
        finally:
            take_in_journal(folder, reporter)
    if summary.failures and not summary.episodes:
        raise EpisodesFailedError(f"no episode could be scored: {summary.failures.most_common(1)[0][0]}")
    for line in (*summary.lines(), *scorer.take_thread_lines()):
        reporter.say(line)
    reporter.give(summary.to_json())


def _scorer(config: BridgeConfig) -> Scorer:
    function = load_reward(config.graph)
    return Scorer(
        config.rewards,
        (function, config.graph.reward or "") if function is not None else None,
        config.graph.reward_timeout_s,
        agents=(*config.graph.nodes, *config.graph.frozen),
    )


def _selected_limit_reward(config: BridgeConfig, only: Sequence[str]) -> LimitReward | None:
    """`graph.limit_reward`, where the reward that it is of is among those to be computed."""
    reward = config.limit_reward
    if reward is None or not only:
        return reward
    is_declared = any(table.name == reward.name for table in config.rewards)
    return reward if (reward.name if is_declared else FUNCTION) in only else None


def _unfinished_to_scores(
    store: TraceStore, limit_reward: LimitReward | None
) -> tuple[dict[str, Score], dict[str, int]]:
    """Episodes that did not come to their end -> what those earned that a limit cut short, and the others' outcomes."""
    scores: dict[str, Score] = {}
    left_out: Counter[str] = Counter()
    for episode_id, outcome, reason in store.sql(_UNFINISHED):
        if limit_reward is not None and outcome == "truncated" and is_limit(reason):
            scores[episode_id] = limit_reward.to_score()
        else:
            left_out[outcome] += 1
    return scores, left_out


class _Summary:
    """The sums over the new rewards, by name; and the number of episodes that were left out, by outcome."""

    def __init__(self, left_out: Mapping[str, int]) -> None:
        self.left_out = left_out
        self.episodes = 0
        self.sums: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.parts: Counter[tuple[str, str]] = Counter()  # (name, step or agent) -> numbers
        self.missing_rewards: Counter[tuple[str, str]] = Counter()
        self.needs_result: set[str] = set()
        self.failures: Counter[str] = Counter()  # why episodes were not scored

    def add(self, score: Score) -> None:
        """Adds the rewards of one episode."""
        self.episodes += 1
        self.sums.update(score.team)
        self.counts.update(score.team.keys())
        self.parts.update(
            (n, reward.level) for n, earned in score.earned.items() for reward in earned if reward.level != "episode"
        )
        absent = score.absent.items()
        self.missing_rewards.update((name, reason) for name, reason in absent if name not in score.needs_result)
        self.needs_result |= score.needs_result

    def figures(self) -> str:
        """The mean of each team reward so far, for a progress bar."""
        means = [f"{name} {self.sums[name] / count:.3f}" for name, count in sorted(self.counts.items())]
        rest = [f"and {len(means) - MAX_SHOWN} more"] if len(means) > MAX_SHOWN else []
        return "  ".join(means[:MAX_SHOWN] + rest)

    def to_json(self) -> dict[str, Any]:
        """The summary under names, for `--json`."""
        return {
            "episodes": self.episodes,
            "left_out": dict(self.left_out),
            "rewards": {name: {"episodes": n, "mean": self.sums[name] / n} for name, n in sorted(self.counts.items())},
            "parts": [{"reward": name, "level": level, "numbers": n} for (name, level), n in self.parts.items()],
            "missing": [
                {"reward": name, "reason": reason, "episodes": n} for (name, reason), n in self.missing_rewards.items()
            ],
            "failures": dict(self.failures),
            "needs_final_state": sorted(self.needs_result),
        }

    def lines(self) -> Iterator[str]:
        """The lines of the summary."""
        yield f"scored {self.episodes} episodes"
        if self.left_out:
            counts = " and ".join(f"{count} {outcome}" for outcome, count in self.left_out.items())
            yield f"left out, because only a run that came to its end has a return: {counts}"
        for name, count in sorted(self.counts.items()):
            yield f"{name}: {count} episodes, mean {self.sums[name] / count:.4g}"
        for (name, level), count in sorted(self.parts.items()):
            yield f"{name}: {count} numbers for {level}s"
        for (name, reason), count in self.missing_rewards.most_common():
            yield f"{count} of {self.episodes} episodes go without the reward {name!r}: {reason}"
        for reason, count in self.failures.most_common():
            yield f"{count} episodes were left as they were: {reason}"
        if self.needs_result:
            names = ", ".join(sorted(self.needs_result))
            yield f"left as they were, because they read the final state, which is not stored: {names}"


def _score_all(
    scorer: Scorer,
    folder: RunFolder,
    episodes: Sequence[str],
    *,
    cut_scores: Mapping[str, Score],
    only: Sequence[str],
    in_flight: int,
    summary: _Summary,
    reporter: Reporter,
) -> None:
    reward_context = RewardEnvironment(folder.path)
    journal = Journal(folder.journal)
    try:
        with (
            reporter.bars(),
            reporter.task("score", len(cut_scores) + len(episodes)) as task,
            asyncio.Runner() as runner,
        ):

            def keep_score(episode_id: str, score: Score) -> None:
                journal.append_rewards(score.to_rewards(episode_id, time.time_ns(), RESCORED.__add__))
                summary.add(score)
                task.update(summary.episodes, summary.figures())

            for episode_id, cut_score in cut_scores.items():
                keep_score(episode_id, cut_score)
            journal.sync()
            for start in range(0, len(episodes), PAGE):
                views = _episodes_to_views(folder, episodes[start : start + PAGE], reward_context, reporter=reporter)
                page = _score_page(
                    scorer, views, only, in_flight=in_flight, keep_score=keep_score, failures=summary.failures
                )
                runner.run(page)
                journal.sync()
    finally:
        journal.close()


def _episodes_to_views(
    folder: RunFolder, ids: Sequence[str], reward_context: RewardEnvironment, reporter: Reporter
) -> deque[RunView]:
    with TraceStore.open(folder.store, read_only=True, wait_s=WAIT_S, on_wait=reporter.say) as store:
        episodes = [(store.trajectory(episode_id), store.spans(episode_id)) for episode_id in ids]
    return deque(
        RunView(trajectory.episode.task, None, trajectory, spans=spans, rescoring=True, environment=reward_context)
        for trajectory, spans in episodes
        if trajectory is not None  # erased in the meantime
    )


async def _score_page(
    scorer: Scorer,
    views: deque[RunView],
    only: Sequence[str],
    in_flight: int,
    keep_score: Callable[[str, Score], None],
    failures: Counter[str],
) -> None:
    """Scores `views` and empties it, so that an episode's spans are released as soon as it is scored."""

    async def work() -> None:
        while views:
            view = views.popleft()
            trajectory = view.game()
            try:
                score = await scorer.run_to_score(
                    view, lambda name: not only or name in only, _team_rewards(trajectory)
                )
            except RewardFailedError as failure:
                failures[" ".join(str(failure).split())] += 1
            else:
                keep_score(trajectory.episode.episode_id, score)

    await asyncio.gather(*(work() for _ in range(in_flight)))


def _team_rewards(trajectory: Trajectory) -> dict[str, float]:
    names = {reward.name for reward in trajectory.rewards if reward.scope == "episode"}
    return {name: value for name in names if (value := trajectory.team_reward(name)) is not None}
