"""`marft-bridge rank`: the runs of each task, compared in pairs by a judge -> a reward for each beside the others.

What is compared is what one node answered in a run, or all that the nodes answered. Invariants: a task with one run has
nothing to compare; rewards of a task are written once all of its pairs are judged, and a task that has them by the same
judge and rubric is not judged again; an attempt in no pair that counts gets no reward.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.rewards.contract import ModelAddress
from marft_bridge.rewards.judge import JudgeOptions, check_judge, read_key
from marft_bridge.rewards.ranking import Ranker, Ranking
from marft_bridge.rewards.rubric import rubric_to_text
from marft_bridge.runs.run_store import WAIT_S
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.records import Reward
from trace_store.store import TraceStore

_RUNS = """
FROM episodes WHERE split IN ('train', 'live') AND fork_action IS NULL AND variant IS NULL AND outcome = 'terminated'
"""
_GROUPS = f"""
SELECT e.task_id, any_value(e.task), list(e.episode_id ORDER BY e.started_ns, e.episode_id)
FROM ({_RUNS}) e
SEMI JOIN (FROM actions WHERE completion IS NOT NULL AND node <> '' AND ($1 IS NULL OR node = $1)) a USING (episode_id)
WHERE $3 IS NULL OR NOT EXISTS (
    FROM rewards r JOIN episodes ranked USING (episode_id)
    WHERE ranked.task_id = e.task_id AND r.name = $2 AND r.source = $3
)
GROUP BY e.task_id HAVING count(*) > 1 ORDER BY e.task_id
"""
_TEXTS = """
SELECT episode_id,
       string_agg(CASE WHEN $1 IS NULL THEN node || ': ' ELSE '' END || completion, chr(10) ORDER BY "index")
FROM actions
WHERE episode_id = ANY($2) AND completion IS NOT NULL AND node <> '' AND ($1 IS NULL OR node = $1) GROUP BY episode_id
"""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The options of the command line."""

    name: str  # of the reward
    judge: JudgeOptions
    node: str | None = None  # whose answers are compared; None: all answers of the run
    runs: int = 8  # of a task, at most
    constrained: bool = False  # see `Ranker`


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one task."""

    task: str  # JSON
    episode_ids: tuple[str, ...]


def file_to_rubric(path: Path) -> str:
    """The text of a rubric file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rank --rubric: cannot read {path}: {error}") from None


def rank(path: Path, run_folder: Path | None, options: RankOptions, reporter: Reporter) -> None:
    """Ranks the runs of every task, and writes the rewards.

    Args:
        path: of the store.
        run_folder: that keeps the judge's verdicts; None for a store alone, where a stopped task begins anew.

    Raises:
        ConfigError: no task has two runs to compare; the judge's options or the rubric cannot be used.
        GraphError: the judge refuses every request.
    """
    judge = options.judge
    check_judge(judge)
    settings = [judge.rubric, options.node, *(["constrained"] if options.constrained else [])]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    source = f"rank {judge.model} {digest}"
    with open_for_reading(path) as store:
        groups = read_groups(store, options.node, name=options.name, source=source, runs=options.runs)
    if not groups:
        raise ConfigError(
            f"rank: {path} has no task with two runs to compare of which none is ranked by this judge and rubric: a "
            "task that has ranked runs is left alone, with what was recorded later, since the two would not compare"
        )
    assert judge.base_url is not None
    assert judge.model is not None
    address = ModelAddress(judge.base_url, judge.model, read_key(judge) or "")
    counts: Counter[str] = Counter()
    tokens: list[tuple[int | None, int | None]] = []
    with reporter.bars(), reporter.task("rank", len(groups)) as progress:
        for done, group in enumerate(groups, start=1):
            texts = read_texts(path, group, options.node)
            rubric = rubric_to_text(judge.rubric, json.loads(group.task))
            ranker = Ranker(judge, address, rubric, folder=run_folder, constrained=options.constrained)
            ranking = asyncio.run(ranker.rank(texts))
            counts["rewards_written"] += _put_rewards(path, ranking, options, source=source, reporter=reporter)
            counts.update(pairs=ranking.counted, ties=ranking.ties, inconsistent=ranking.inconsistent)
            counts.update(
                unanswered=ranking.unanswered,
                without_reward=sum(value is None for value in ranking.rewards.values()),
            )
            tokens.append((ranking.prompt_tokens, ranking.sampled_tokens))
            progress.update(done, f"{counts['pairs']} pairs")
    prompt, sampled = (_sum([pair[column] for pair in tokens]) for column in (0, 1))
    reporter.say(
        f"{len(groups)} tasks: {counts['pairs']} pairs count, {counts['ties']} of them ties; {counts['inconsistent']} "
        f"were judged otherwise with their places swapped, {counts['unanswered']} got no verdict"
    )
    spent = "tokens that the judge did not count" if prompt is None or sampled is None else f"{prompt + sampled} tokens"
    reporter.say(f"{counts['rewards_written']} rewards written as {options.name!r}, for {spent}")
    reporter.give(
        {
            "tasks": len(groups),
            "source": source,
            **{
                name: counts[name]
                for name in ("pairs", "ties", "inconsistent", "unanswered", "without_reward", "rewards_written")
            },
            "prompt_tokens": prompt,
            "sampled_tokens": sampled,
        }
    )


def read_groups(
    store: TraceStore, node: str | None, *, name: str | None = None, source: str | None = None, runs: int
) -> list[Group]:
    """The tasks with two runs to compare, by task id, at most `runs` of each.

    Args:
        name, source: a task of which one run has this reward already is left out, since a rank among the runs that are
            left would not be comparable; None leaves none out.
    """
    rows = store.sql(_GROUPS, (node, name, source))
    return [Group(task, tuple(episode_ids[:runs])) for _, task, episode_ids in rows]


def read_texts(path: Path, group: Group, node: str | None) -> dict[str, str]:
    """Episode -> what is compared. Only one task's texts are in memory."""
    with open_for_reading(path) as store:
        return dict(store.sql(_TEXTS, (node, list(group.episode_ids))))


def _put_rewards(path: Path, ranking: Ranking, options: RankOptions, *, source: str, reporter: Reporter) -> int:
    rewards = [
        Reward(
            episode_id,
            options.name,
            value,
            source=source,
            created_ns=time.time_ns(),
            scope="episode" if options.node is None else "agent",
            node=options.node,
        )
        for episode_id, value in ranking.rewards.items()
        if value is not None
    ]
    with TraceStore.open(path, wait_s=WAIT_S, on_wait=reporter.say) as store:
        return store.put_rewards(rewards)


def _sum(numbers: Sequence[int | None]) -> int | None:
    """None where one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
