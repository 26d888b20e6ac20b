"""Results of a study's runs -> its page in Markdown.

Invariant: a pure function of the results, of study.toml and of the table of conditions; what was not run is a dash, and
no sentence has a figure of a run in it but through the runs. It knows nothing of files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from examples.study.conditions import BASELINE, CONDITIONS, LEVELS, SEEDS, WITHOUT_OFFLINE
from examples.study.figures import (
    ByCondition,
    area,
    fresh_before,
    paired,
    reached,
    results_by_condition,
    rewards,
    seconds_a_round,
)
from examples.study.results import Result
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.statistics import MeanInterval, mean_interval

NONE = "–"
Runs = Mapping[int, Result]


def results_to_page(results: Sequence[Result], config: BridgeConfig) -> str:
    """The whole page in Markdown; `config` is what all conditions share."""
    by_condition = results_by_condition(results)
    sections = [
        _opening(by_condition),
        _setting(config),
        _conditions(),
        _curves(by_condition),
        _differences(by_condition),
        _levels(by_condition),
        _offline(by_condition, config),
        _time(by_condition),
        _limits(config),
    ]
    return "\n".join(f"{section.rstrip()}\n" for section in sections)


# -- sections ---------------------------------------------------------------------------------------------------------


def _opening(by_condition: ByCondition) -> str:
    planned = len(CONDITIONS) * len(SEEDS)
    there = sum(len(runs) for runs in by_condition.values())
    state = "" if there >= planned else f"\n**{there} of {planned} runs are done; a dash is what was not run.**\n"
    return f"""# Seven ways to train one duo

Which of the trainer's methods learns how fast, on the graph of `make demo`, with the same budget; and what the episodes
that were recorded before training are worth. Made by `examples/study/`; `docs/study.json` holds every figure that
this page is computed from.
{state}{_code(by_condition)}
```sh
python -m examples.study.run --dry-run    # the plan, and how long it takes
python -m examples.study.run              # all conditions, seeds {", ".join(map(str, SEEDS))}; stopped, it goes on
python -m examples.study.report           # this page
```
"""


def _code(by_condition: ByCondition) -> str:
    """Whether all runs are of one program; nothing where there is no run."""
    runs = [result for each in by_condition.values() for result in each.values()]
    known = {result.code_sha256 for result in runs if result.code_sha256 is not None}
    if not runs:
        return ""
    if len(known) == 1 and all(result.code_sha256 is not None for result in runs):
        return f"\nAll runs are of one program (SHA-256 of its source {known.pop()[:12]}).\n"
    unknown = sum(result.code_sha256 is None for result in runs)
    return (
        f"\n**Not all runs are of one program: {len(known)} versions of it, and {unknown} runs during which it changed "
        "or may have.**\n"
    )


def _setting(config: BridgeConfig) -> str:
    train, trainer, steps = config.train, config.train.trainer, config.train.trainer.optimizer
    tasks = train.episodes_per_round // train.samples_per_task
    return f"""## What all have in common

- `{config.graph.app}` on `{config.model.path}`, temperature {config.sampling.temperature:g}, at most
  {config.sampling.max_tokens} tokens a call, a {config.serve.dtype} engine on the CPU.
- {config.collect.episodes} episodes of the untrained graph for each seed, recorded once: every condition of a seed
  begins with the same. First the offline phase ({trainer.offline.mode}: imitation of the episodes that earned
  {trainer.offline.threshold:g}), then {train.rounds} rounds of {train.episodes_per_round} fresh episodes:
  {tasks} tasks, {train.samples_per_task} samples each. Group estimators need several samples of a task; so that only
  the learning differs, all conditions of a seed get the same tasks in the same rounds, with the same sampling seeds.
- Learning rate {steps.lr:g}, {steps.minibatch_actions} actions a step, {steps.epochs} epoch a round, both signs of an
  advantage at full weight; every episode counts the same; no KL or entropy term. The rate, the steps and the offline
  phase are those that `examples/math_duo` had, fixed before the first run and not tuned for any condition.
- The trained reward is 1 for the right number at the end, 0.1 where it only occurs; `{config.compare.metric}` on
  {config.compare.tasks} held-out tasks is 1 or 0. Held-out tasks are run once before training and once after
  it: by the last version in the runs below; a run of today takes the one that training names best.
"""


def _conditions() -> str:
    rows = [
        (f"`{name}`", condition.about, "<br>".join(_change(*item) for item in condition.changes.items()) or NONE)
        for name, condition in CONDITIONS.items()
    ]
    return f"## Conditions\n\n{_table(('condition', 'what it is', 'changes in study.toml'), rows)}"


def _curves(by_condition: ByCondition) -> str:
    rows = []
    for name in CONDITIONS:
        runs = by_condition.get(name, {})
        last = {seed: rewards(result)[-1] for seed, result in runs.items()}
        held = {seed: result.heldout.after for seed, result in runs.items()}
        before = {seed: result.heldout.before for seed, result in runs.items()}
        first = {seed: rewards(result)[0] for seed, result in runs.items()}
        areas = {seed: area(result) for seed, result in runs.items()}
        columns = (first, last, areas, before, held)
        rows.append((f"`{name}`", str(len(runs)), *(_over_seeds(values) for values in columns)))
    head = (
        "condition",
        "seeds",
        "reward, first round",
        "reward, last round",
        "area",
        "held-out before",
        "held-out after",
    )
    t = float(stdtrit(len(SEEDS) - 1, 0.975))
    return f"""## Learning curves

![Mean reward of each round over fresh rollouts](study.svg)

Thin lines are seeds, the thick one is their mean, the band its 95 % t interval; `{BASELINE}` is dashed in the other
panels.
The interval of {len(SEEDS)} seeds is wide: {t:.2f} standard errors to each side, {t / len(SEEDS) ** 0.5:.2f} standard
deviations of the seeds. A point is what the adapters earned in a round, over the fresh rollouts that they had been
trained on by then; the first round is sampled after the offline phase.

{_table(head, rows)}
Mean rewards, and on held-out tasks the share that was right, over seeds with their intervals. The area is that under
the curve divided by its length: the mean reward on the way.
"""


def _differences(by_condition: ByCondition) -> str:
    base = by_condition.get(BASELINE, {})
    rows = []
    for name in CONDITIONS:
        if name == BASELINE:
            continue
        runs = by_condition.get(name, {})
        areas = paired({s: area(r) for s, r in base.items()}, {s: area(r) for s, r in runs.items()})
        held = paired({s: r.heldout.after for s, r in base.items()}, {s: r.heldout.after for s, r in runs.items()})
        rows.append((f"`{name}`", _signed(areas), _verdict(areas), _signed(held), _verdict(held)))
    return f"""## Against `{BASELINE}`, seed by seed

{_table(("condition", "area", "", "held-out after", ""), rows)}
Differences to `{BASELINE}` of the same seed, which began with the same episodes, with 95 % t intervals over the seeds.
"Not told apart" is not "the same": {len(SEEDS)} seeds show large differences only. These are {2 * len(rows)}
comparisons without a correction; at 95 % one in twenty is beyond its interval by chance.
"""


def _levels(by_condition: ByCondition) -> str:
    rows = []
    for name in CONDITIONS:
        runs = by_condition.get(name, {})
        rows.append((f"`{name}`", *(_reached(runs, level) for level in LEVELS)))
    head = ("condition", *(f"reward {level:g}" for level in LEVELS))
    return f"""## Fresh rollouts until a level is reached

{_table(head, rows)}
For each seed in order, the fresh rollouts behind the adapters that first earned that much in a round; > N: not in any
round, the last of which was behind N. A round's mean is itself uncertain, so a level can be reached by luck; look at
the curves.
"""


def _offline(by_condition: ByCondition, config: BridgeConfig) -> str:
    with_traces, without = by_condition.get(BASELINE, {}), by_condition.get(WITHOUT_OFFLINE, {})
    rows = []
    for seed in sorted(with_traces.keys() | without.keys() | set(SEEDS)):
        pair = with_traces.get(seed), without.get(seed)
        rows.append((str(seed), *(_saved(*pair, level) for level in LEVELS)))
    head = ("seed", *(f"until reward {level:g}" for level in LEVELS))
    gain = paired({s: rewards(r)[0] for s, r in without.items()}, {s: rewards(r)[0] for s, r in with_traces.items()})
    return f"""## What the old traces saved

Fresh rollouts that `{WITHOUT_OFFLINE}` needed beyond those of `{BASELINE}`:

{_table(head, rows)}
Rollouts that are not needed, in exchange for {config.collect.episodes} recorded episodes that were there anyway.
"≥": without the traces the level was not reached in the budget. "≤": only the run without them reached it. In the
first round, which no fresh rollout went into, the traces are worth {_signed(gain)} of reward.
"""


def _time(by_condition: ByCondition) -> str:
    rows = []
    for name in CONDITIONS:
        runs = by_condition.get(name, {})
        rollout, update = seconds_a_round(runs.values())
        whole = [r.seconds for r in runs.values() if r.seconds is not None]
        minutes = f"{sum(whole) / len(whole) / 60:.1f}" if whole else NONE
        rows.append((f"`{name}`", _seconds(rollout), _seconds(update), minutes))
    head = ("condition", "rollouts, s a round", "update, s a round", "whole run, min")
    cores = {r.cores for runs in by_condition.values() for r in runs.values() if r.cores is not None}
    counted = " or ".join(map(str, sorted(cores))) or NONE
    return f"""## Time

{_table(head, rows)}
CPU cores for each run: {counted}. A whole run has its own model server, the offline phase and the comparison in it.
"""


def _limits(config: BridgeConfig) -> str:
    return f"""## What this does not show

- One graph of two agents that act once each, one model, one learning rate: no ranking of the methods in general. Longer
  graphs are where credit along the dependencies has more to do.
- `ippo` differs from `marft-a-simultaneous` in the critic and in lambda, and in nothing else here. Where an agent
  acts several times, no option yet keeps GAE within its own calls.
- `dr-mas` computes here what `grpo` does: they part where agents act unequally often, or are rewarded apart.
- `{WITHOUT_OFFLINE}` still takes where its critic starts (a mean, and the scale of features) from the recorded
  episodes.
- {config.train.rounds} rounds are few; which curve ends higher with more of them is open.
"""


# -- cells ------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _change(key: str, value: Any) -> str:
    return f"`{key.removeprefix('train.trainer.')} = {json.dumps(value)}`"


def _over_seeds(values: Mapping[int, float]) -> str:
    return _interval(mean_interval(list(values.values())), ".3f") if values else NONE


def _signed(interval: MeanInterval | None) -> str:
    return NONE if interval is None else _interval(interval, "+.3f")


def _interval(interval: MeanInterval, form: str) -> str:
    mean = f"{interval.mean:{form}}"
    if interval.low is None or interval.high is None:
        return mean.replace("-", "−")
    return f"{mean} ({interval.low:{form}} to {interval.high:{form}})".replace("-", "−")


def _verdict(interval: MeanInterval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return NONE
    return "above" if interval.low > 0 else "below" if interval.high < 0 else "not told apart"


def _reached(runs: Runs, level: float) -> str:
    cells = []
    for seed in sorted(runs):
        at = reached(runs[seed], level)
        cells.append(f"> {fresh_before(runs[seed])[-1]}" if at is None else str(at))
    return ", ".join(cells) or NONE


def _saved(with_traces: Result | None, without: Result | None, level: float) -> str:
    """Rollouts that the traces saved one seed; a bound where one side never got there."""
    if with_traces is None or without is None:
        return NONE
    sooner, later = reached(with_traces, level), reached(without, level)
    if sooner is not None and later is not None:
        return f"{later - sooner}".replace("-", "−")
    # a run that reached no level in any round needs more than what is behind its last one
    if sooner is not None:
        return f"≥ {fresh_before(without)[-1] - sooner}".replace("-", "−")
    if later is not None:
        return f"≤ {later - fresh_before(with_traces)[-1]}".replace("-", "−")
    return "neither"


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"
