"""Three graphs of the zoo whose reward is known -> how far a judge that compares their runs agrees with it.

    python -m examples.hosted_to_local.agreement runs/agreement
    python -m examples.hosted_to_local.agreement runs/agreement --judge runs/judge/model

Each graph runs several times on each task (`collect`), the judge ranks the runs of each task (`rank`) without the known
answers, and a Markdown table says how the two orders agree. Without --judge or --base-url the judge is the small model
that ran the graphs. Invariants: only runs of one task are compared, since a ranking says nothing across tasks; several
judges of one folder judge the same runs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import get_args

from examples.hosted_to_local import judged_games as games
from examples.hosted_to_local.hosted_server import open_server
from marft_bridge.commands.rank import RankOptions, rank, read_groups
from marft_bridge.common.errors import BridgeError
from marft_bridge.common.files import write_atomically
from marft_bridge.common.progress import Reporter
from marft_bridge.rewards.judge import JudgeOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.statistics.means import MeanInterval, mean_interval
from trace_store.store import TraceStore

KEY = "AGREEMENT_KEY"  # variable with the key of the server that this script starts
SMALL, TRAINED = "smollm2-135m", "trained-judge"  # judges that are served here
REPLY_TOKENS = 160  # of a verdict with its reason, at most
_ATTEMPTS = """
SELECT e.task_id, k.value, j.value
FROM episodes e JOIN episode_reward k ON k.episode_id = e.episode_id AND k.name = $1
LEFT JOIN episode_reward j ON j.episode_id = e.episode_id AND j.name = $2
WHERE e.outcome = 'terminated' ORDER BY e.task_id, e.episode_id
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of a task: what it earned, and what the judge's ranking gave it; None where no verdict counts."""

    task_id: str
    known: float
    judged: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two orders agree on the pairs of attempts of one task. The first three counts are of pairs whose known
    rewards differ and that the judge ordered, tied or left out."""

    tasks: int
    pairs: int  # of attempts of one task
    same: int
    other: int  # ordered the other way
    tied: int
    without: int  # an attempt of it has no judged reward
    share: MeanInterval | None  # same / (same + other), its 95 % interval by task; None without such a pair
    tau_b: float | None  # over the pairs of one task with both rewards; None where an order ties all of them


@dataclass(frozen=True, slots=True)
class Judge:
    """Who is asked. `api_key_env` names the variable that holds the key; `constrained` is that of `rank`."""

    base_url: str
    model: str
    api_key_env: str | None = None
    allow_remote: bool = False
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Judging:
    """What a judge made of the pairs of attempts, and what that took."""

    counted: int  # pairs with the same verdict in both orders
    ties: int  # of them
    inconsistent: int
    unanswered: int
    tokens: int | None  # prompts and replies; None where the judge did not count them
    seconds: float


def attempts_to_agreement(attempts: Sequence[Attempt]) -> Agreement:
    """Kendall's tau-b is that of one table when there is one task; with several, its sums run over all of them."""
    by_task: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_task.setdefault(attempt.task_id, []).append(attempt)
    pairs = [pair for group in by_task.values() for pair in combinations(group, 2)]
    outcomes: list[float] = []  # 1: ordered as the known rewards; 0: the other way
    tasks: list[str] = []
    tied = without = known_ties = 0  # of the last, pairs that only the known rewards tie
    for one, other in pairs:
        if one.judged is None or other.judged is None:
            without += one.known != other.known
            continue
        judged_sign = _sign(one.judged - other.judged)
        if one.known == other.known:
            known_ties += judged_sign != 0
        elif judged_sign == 0:
            tied += 1
        else:
            outcomes.append(float(judged_sign == _sign(one.known - other.known)))
            tasks.append(one.task_id)
    same = int(sum(outcomes))
    ordered = len(outcomes)
    scale = sqrt((ordered + tied) * (ordered + known_ties))
    return Agreement(
        tasks=len(by_task),
        pairs=len(pairs),
        same=same,
        other=ordered - same,
        tied=tied,
        without=without,
        share=_share(outcomes, tasks) if outcomes else None,
        tau_b=(2 * same - ordered) / scale if scale else None,
    )


def agreements_to_table(agreements: Mapping[tuple[str, str], tuple[Judging, Agreement]]) -> str:
    """(judge, graph) -> how it judged and agreed, as Markdown."""
    columns = (
        *("judge", "graph", "tasks", "pairs of runs", "same verdict in both orders", "ties of them", "no verdict"),
        *("reward differs", "ordered alike", "the other way", "tied", "not ordered"),
        *("alike of those ordered, 95 %", "tau-b", "tokens", "seconds"),
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for (judge, graph), (judging, agreement) in agreements.items():
        differing = agreement.same + agreement.other + agreement.tied + agreement.without
        tokens = "-" if judging.tokens is None else f"{judging.tokens:,}"
        cells = [
            *(judge, f"`{graph}`", agreement.tasks, agreement.pairs, judging.counted, judging.ties),
            *(judging.unanswered, differing, agreement.same, agreement.other, agreement.tied, agreement.without),
            _share_to_text(agreement.share),
            *("-" if agreement.tau_b is None else f"{agreement.tau_b:+.2f}", tokens, f"{judging.seconds:.0f}"),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def store_to_attempts(path: Path, reward: str) -> list[Attempt]:
    """The runs of a store that earned the known reward, and what a judge's ranking gave them."""
    with TraceStore.open(path, read_only=True) as store:
        return [Attempt(*row) for row in store.sql(_ATTEMPTS, (games.KNOWN, reward))]


def judge_runs(graph: str, run_folder: Path, judge: Judge, *, samples: int) -> tuple[Judging, Agreement]:
    """Has the runs in a run folder ranked, and compares.

    A judge that judged all of them is not asked again. One that was stopped, or judged fewer, is asked for what it did
    not judge yet at this address; the seconds are then those of the last time only.
    """
    run = RunFolder(run_folder)
    path = run.path / f"{judge.model.replace('/', '-')}.judging.json"
    with TraceStore.open(run.store, read_only=True) as store:
        tasks = len(read_groups(store, None, runs=samples))
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if found is None or found["tasks"] != tasks:
        # A name of its own each time: what has one already would not be counted.
        reward = f"ranked by {judge.model} {secrets.token_hex(4)}"
        options = JudgeOptions(
            name=reward,
            answer_from="run",
            rubric=games.RUBRICS[graph],
            base_url=judge.base_url,
            model=judge.model,
            api_key_env=judge.api_key_env,
            allow_remote=judge.allow_remote,
            max_tokens=REPLY_TOKENS,
            retries=0,  # a small judge says no better the second time
        )
        findings, started = io.StringIO(), time.monotonic()
        rank_options = RankOptions(reward, options, runs=samples, constrained=judge.constrained)
        rank(run.store, run.path, rank_options, Reporter(json_output=findings))
        found = json.loads(findings.getvalue()) | {"reward": reward, "seconds": time.monotonic() - started}
        write_atomically(path, json.dumps(found) + "\n")
    spent = (found["prompt_tokens"], found["sampled_tokens"])
    judging = Judging(
        counted=found["pairs"],
        ties=found["ties"],
        inconsistent=found["inconsistent"],
        unanswered=found["unanswered"],
        tokens=None if None in spent else sum(spent),
        seconds=found["seconds"],
    )
    return judging, attempts_to_agreement(store_to_attempts(run.store, found["reward"]))


@contextmanager
def open_judge(given: argparse.Namespace) -> Iterator[Judge]:
    """The judge that was asked for; one that is served here lives as long as the block."""
    if given.base_url is not None:
        yield Judge(given.base_url, given.model, given.api_key_env, given.allow_remote)
        return
    is_small = given.judge is None
    model, name = (games.small_model(), SMALL) if is_small else (given.judge, TRAINED)
    with open_server(model, given.folder / "judge.log", name=name, max_model_len=2048) as (base_url, key):
        os.environ[KEY] = key
        # A small model keeps to no form by itself; one that was taught a form does.
        yield Judge(base_url, name, KEY, constrained=is_small)


def _sign(difference: float) -> int:
    """Fitted rewards that differ by less than the fit's tolerance are tied."""
    return 0 if abs(difference) < 1e-6 else 1 if difference > 0 else -1


def _share(outcomes: Sequence[float], tasks: Sequence[str]) -> MeanInterval:
    interval = mean_interval(outcomes, clusters=tasks)
    if interval.low is None or interval.high is None:
        return interval  # outcomes that are all equal show no spread
    return MeanInterval(interval.mean, max(0.0, interval.low), min(1.0, interval.high))


def _share_to_text(share: MeanInterval | None) -> str:
    if share is None:
        return "-"
    bounds = "" if share.low is None or share.high is None else f" [{share.low:.2f}, {share.high:.2f}]"
    return f"{share.mean:.2f}{bounds}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.agreement", description=__doc__)
    parser.add_argument("folder", type=Path, help="gets a run folder for each graph of a side")
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4, help="runs of each task")
    parser.add_argument("--side", choices=get_args(games.Side), default="measured", help="of tasks")
    parser.add_argument("--judge", type=Path, help="a model folder that is served here as the judge")
    parser.add_argument("--base-url", help="another judge's address, up to and with /v1")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--api-key-env", help="the variable that holds its key")
    parser.add_argument("--allow-remote", action="store_true", help="it may be on another machine")
    given = parser.parse_args()
    if (given.base_url is None) != (given.model is None):
        parser.error("--base-url and --model go together")
    if given.judge is not None and given.base_url is not None:
        parser.error("--judge and --base-url name two judges")
    given.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    agreements = {}
    try:
        attempts = dict.fromkeys(games.CONFIGS, games.Attempts(given.tasks, given.samples))
        runs = given.folder.resolve() / given.side
        games.collect_missing(runs, given.side, attempts)
        with open_judge(given) as judge:
            for graph in games.CONFIGS:
                agreements[judge.model, graph] = judge_runs(graph, runs / graph, judge, samples=given.samples)
    except BridgeError as error:
        sys.exit(str(error))
    print(agreements_to_table(agreements))


if __name__ == "__main__":
    main()
