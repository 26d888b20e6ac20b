"""Runs of the benchmarks -> their page in Markdown.

Invariant: a pure function of the runs and of the tables below. What was not run is said to be; no sentence has a figure
of ours in it but through the runs, and none of others without its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from examples.benchmarks.conditions import BASELINE, CONDITIONS
from examples.benchmarks.figures import (
    Runs,
    Setting,
    area_differences,
    calls_of_a_run,
    learned,
    repeated_share,
    runs_by_setting,
    teaching_calls,
)
from examples.benchmarks.results import BenchmarkRun
from marft_bridge.statistics import MeanInterval, mean_interval

NOT_RUN = "not run yet"
NONE = "–"
TREES = "trees"
MIN_SEEDS = 3
"""From which on a mean has an interval: of two seeds that agree by chance it has no width."""

TITLES = {
    "plan_path": "Plan-Path",
    "sudoku": "Sudoku 4x4",
    "sokoban": "Sokoban 6x6",
    "countdown": "Countdown",
}
PUBLISHED: dict[str, tuple[str, ...]] = {
    "one agent": ("7.0", "0.0", "5.0", "48.0", "9.0", "12.0"),
    "one agent, GRPO": ("29.0", "3.0", "11.0", "54.0", "14.0", "47.0"),
    "two agents": ("69.0", "0.0", "10.0", "72.0", "16.0", "71.0"),
    "two agents, AT-GRPO, one policy": ("99.0", "10.0", "96.0", "99.5", "96.0", "93.0"),
    "two agents, AT-GRPO, one each": ("99.0", "11.5", "97.0", "99.0", "98.0", "96.0"),
}
"""Sudoku, Sokoban and Plan-Path of Qwen3-1.7B, then of Qwen3-8B, in percent."""

GAMES = (
    (
        "",
        "task",
        "an answer",
        "first",
        "easy",
        "middle",
        "published",
    ),
    (
        "Plan-Path",
        "a way through a grid with obstacles",
        "`R2 D`: moves",
        "4x4, 1 to 3 moves",
        "5x5, 3 to 5",
        "7x7, 4 to 10",
        "10x10, 22 % blocked",
    ),
    (
        "Sudoku",
        "the empty cells of a grid of 4x4",
        "`r1c2=3`: entries",
        "1 empty",
        "3",
        "5",
        "8",
    ),
    (
        "Sokoban",
        "a box to push onto its goal, in a room of 6x6",
        "`U R2`: moves",
        "1 to 3 moves",
        "3 to 5",
        "4 to 9",
        "box 2 or more from its goal",
    ),
    (
        "Countdown",
        "all of some numbers to a target",
        "`3 * 4 + 5`",
        "2 numbers, + -",
        "3, + -",
        "3, + - *",
        "4, + - * /",
    ),
)
DIFFERENCES = (
    (
        "",
        "theirs",
        "ours",
    ),
    (
        "tool",
        "a Python program, run for 20 s at most",
        (
            "a line of the game, since a small model writes no search; `--published`: Python, in the "
            "[sandbox](rewards.md)"
        ),
    ),
    (
        "what the planner reads",
        "the code, what it printed, the moves in it",
        "the same, and what became of them on a copy of the state",
    ),
    (
        "rewards of a turn",
        "of its own kind, see each graph",
        (
            "the same numbers; an answer of the planner without a move costs the team 1, where theirs takes it "
            "for an empty list, which costs the team nothing; nearness without their 0.99, a box pushed off its goal "
            "pays back all of what it earned, and a cell of Sudoku is paid for once, as returns add up over a run "
            "here and each could be earned again and again"
        ),
    ),
    (
        "an agent's reward",
        "its own plus the team's, of that turn alone",
        "the same two, and what followed of them along D",
    ),
    (
        "Plan-Path",
        "10x10, 22 % blocked, 4 or 5 turns",
        "the same grids by another generator; 4 turns",
    ),
    (
        "Sokoban",
        "a room played backwards from its end; their guide says four boxes, the code makes one",
        "a random room that a search solves; one box",
    ),
    (
        "Sudoku",
        (
            "3 to 11 given cells; of the 400 puzzles that its script makes, 324 cannot be solved with their "
            "given cells and 17 in several ways; a whole grid as an answer is not compared with the given "
            "cells"
        ),
        "8 given cells, one solution; entries only, and given cells stay; one's own can be replaced",
    ),
    (
        "Countdown",
        "TinyZero: one agent, one answer, six numbers, targets that may be out of reach",
        ("two agents, 4 turns, four numbers, a target that can be reached; less 0.05 for each turn after the first"),
    ),
    (
        "training",
        (
            "AT-GRPO: 32 tasks, 4 samples, going on from the best of a turn's samples, 200 steps; the half of the "
            "groups with the lowest mean reward is left out"
        ),
        (
            "see above; `at-grpo` goes on from the best too, but pays a call by its run's reward and not by its "
            "turn's, so that every fork runs to its end; what is left out are groups without spread"
        ),
    ),
    (
        "update",
        (
            "a LoRA of rank 16, alpha 32, on all linear layers, one for both agents; Adam at 5e-6, cosine to 0.3 of it "
            "after ten steps of warm-up; one epoch, minibatches of 16; token ratios, clip 0.2, dual clip 3; advantages "
            "over the group's deviation, and what did worse counts as what did better"
        ),
        (
            "the defaults of this trainer: a LoRA of rank 8 on queries and values for each agent, 1e-3, two epochs, "
            "ratios of whole answers, and what did worse pushes nothing down; `--published`: theirs, but for one "
            "adapter for both and the warm-up by steps"
        ),
    ),
    (
        "before the first round",
        "nothing",
        "192 recorded runs are learned from; `--published`: nothing",
    ),
    (
        "sampling",
        (
            "temperature 1.5 with one policy, 1 with one each, top_p 0.9, top_k 20, repetition penalty 1.2; Qwen3 does "
            "not think"
        ),
        (
            "temperature 1, the whole distribution, no penalty; `--published`: temperature 1.5, and Qwen3 does not "
            "think either"
        ),
    ),
    (
        "sampling at the test",
        "greedy with one policy, temperature 0.6 with one each",
        "as in training",
    ),
    (
        "test",
        "100 tasks of other seeds, in its code; its page says 200",
        "held-out tasks that share no content with those trained on",
    ),
)


def runs_to_page(runs: Sequence[BenchmarkRun]) -> str:
    """The whole page."""
    sections = [_opening(), _games(), _published(), _ours(runs), _trees(runs), _differences(), _small_model()]
    return "\n".join(f"{section.rstrip()}\n" for section in sections)


def _opening() -> str:
    return """# Benchmarks that others publish

Four games that multi-agent training is measured on elsewhere, as graphs: Plan-Path (`graphs/plan_path.py`), Sudoku
(`graphs/sudoku.py`), Sokoban (`graphs/sokoban.py`) and Countdown (`graphs/countdown.py`). Each has two
agents that play it in turns with an environment, tasks from seeds at four levels, and the published rewards. Their
configurations are in `examples/benchmarks/`; `docs/benchmarks.json` holds every figure of ours on this page.

```sh
python -m examples.benchmarks.run --dry-run    # what is left of the plan
python -m examples.benchmarks.run              # all four at the first level, on the small model; stopped, it goes on
python -m examples.benchmarks.run --model smollm2-135m --over examples/benchmarks/smollm2.toml --folder runs/real
python -m examples.benchmarks.report           # this page; --folder runs/real for the runs of the line above
```

`--level` is `first`, `easy`, `middle` or `published`. `--model` takes what `model.path` of a configuration may be, so
the same command runs a real model; `--published` puts the published setting over the configurations, for a GPU:

```sh
python -m examples.benchmarks.run --only at-grpo --level published --published --model models/Qwen3-1.7B
```
"""


def _games() -> str:
    return f"""## The games

{_table(GAMES[0], GAMES[1:])}

In every turn the first agent (tool writer, in Countdown the proposer) writes a program, a tool plays it on a copy of
the state and says what came of it, and the second (planner, checker) reads that and answers; its answer is what the
environment does. A turn says what the last one did. An answer without a move costs; a move that is refused costs, and
takes a step as any other; a run ends when the game is solved, when it has no step left, or after 2 to 4 turns.

`correct` is 1 where the game was solved: the share that the tables show. `reward`, which is trained on, is what the
environment paid for the planner's answers over all turns; `local`, a reward of the step, is what it pays for an agent's
own answer, on a copy for the first agent. Sokoban has a level with two boxes as well (`graphs.sokoban:two_box_tasks`).
"""


def _published() -> str:
    head = ("percent solved", "Sudoku", "Sokoban", "Plan-Path", "Sudoku", "Sokoban", "Plan-Path")
    rows = [(name, *figures) for name, figures in PUBLISHED.items()]
    return f"""## What others publish

PettingLLMs (AT-GRPO, [arXiv 2510.11062](https://arxiv.org/abs/2510.11062)), the first three columns of Qwen3-1.7B, the
others of Qwen3-8B; from `docs/results/benchmarks.md` of its repository at commit a054fb1:

{_table(head, rows)}

It has no Countdown. TinyZero, which the game is from, publishes learning curves of one agent and no table; of
Qwen2.5-0.5B its README says that it does not learn to reason there.
"""


def _ours(runs: Sequence[BenchmarkRun]) -> str:
    settings = runs_by_setting(runs)
    head = ("benchmark", "level", "model", "way", "seeds", "before", "after", "difference", f"area less {BASELINE}")
    rows = [
        row
        for (game, level, model), by_condition in settings.items()
        for row in _setting_to_rows((TITLES[game], level, model), by_condition)
    ]
    have_runs = {game for game, _, _ in settings}
    rows += [(TITLES[game], *([NOT_RUN] * 8)) for game in TITLES if game not in have_runs]
    ways = "\n".join(f"- `{name}`: {condition.about}" for name, condition in CONDITIONS.items())
    return f"""## What came out here

{_table(head, rows)}

Shares of held-out tasks that were solved, means over seeds; the difference is after less before, seed by seed, with its
95 % t interval over seeds. The area is that under the share solved in training, over the tokens sampled so far, up to
where the shorter of the two curves ends; its difference to `{BASELINE}` is taken seed by seed, where one version of the
program ran both. Fewer than three seeds have no interval.

{_programs(runs)}Five seeds, 10 to 14, were planned for the small model and three, 10 to 12, for a real one; where
fewer stand in a row the others were not run yet. A run plays all of its twelve rounds, whether they still pay or not
(`stop_early = false`), and *after* is the version that training named as its best. Rounds and seeds were fixed before
these runs. Runs of `smollm2-135m` have half of the rollouts, for the time that they take on two cores
(`examples/benchmarks/smollm2.toml`). An earlier small model, which had read noisy transcripts alone, learned nothing of
Plan-Path in six rounds, on seeds 0, 3 and 12; those figures are no part of this table.

{ways}
"""


def _programs(runs: Sequence[BenchmarkRun]) -> str:
    """A sentence where the runs are not all of one program."""
    count = len({run.code_sha256 for run in runs})
    return f"The runs are of {count} versions of the program.\n" if count > 1 else ""


def _setting_to_rows(names: tuple[str, str, str], by_condition: Runs) -> list[tuple[str, ...]]:
    rows = []
    for condition in CONDITIONS:
        by_seed = by_condition.get(condition, {})
        if not by_seed:
            rows.append((*names, f"`{condition}`", *([NOT_RUN] * 5)))
            continue
        before, after = (
            mean_interval([getattr(run.heldout, field) for run in by_seed.values()]).mean
            for field in ("before", "after")
        )
        differences = [] if condition == BASELINE else area_differences(by_condition, condition, BASELINE)
        area = _interval(mean_interval(differences), len(differences)) if differences else NONE
        difference = _interval(learned(by_seed), len(by_seed))
        figures = (str(len(by_seed)), f"{before:.3f}", f"{after:.3f}", difference, area)
        rows.append((*names, f"`{condition}`", *figures))
    return rows


def _interval(interval: MeanInterval, seeds: int) -> str:
    if seeds < MIN_SEEDS or interval.low is None or interval.high is None:
        return f"{interval.mean:+.3f}"
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _trees(runs: Sequence[BenchmarkRun]) -> str:
    """Whether trees are better than chains at equal tokens, and what they had to work with."""
    both = {
        setting: by_condition
        for setting, by_condition in runs_by_setting(runs).items()
        if BASELINE in by_condition and TREES in by_condition
    }
    head = (
        "benchmark",
        "model",
        "calls of a run",
        "tokens given again",
        f"calls that teach, `{BASELINE}`",
        f"`{TREES}`",
    )
    rows = [
        (
            TITLES[game],
            model,
            _figure(calls_of_a_run(by_condition[BASELINE]), ".1f"),
            _figure(repeated_share(by_condition[TREES]), ".0%"),
            _figure(teaching_calls(by_condition[BASELINE]), ".0f"),
            _figure(teaching_calls(by_condition[TREES]), ".0f"),
        )
        for (game, _, model), by_condition in both.items()
    ]
    return f"""## Are trees better than chains?

{_verdict(both)}

{_table(head, rows)}

What would explain it, though nothing of it was varied: a fork spares what lies before its call, whose answers are given
again and not sampled (*tokens given again*, of those of all answers in rounds of `{TREES}`), and for that a round has
half as many tasks. Games of the first level are over after one or two turns, so there is little before a call that a
fork could spare. And as many tokens give about as many calls that have an advantage to learn from (*calls that teach*,
of a thousand sampled tokens) whether they went to chains or to trees, but of half as many tasks. Forks of long runs
spare more: not measured here, as the small model knows the first level alone.
"""


def _verdict(both: Mapping[Setting, Runs]) -> str:
    """How many settings have an interval of the difference of areas, and on which side of 0."""
    intervals = [
        mean_interval(differences)
        for by_condition in both.values()
        for differences in [area_differences(by_condition, TREES, BASELINE)]
        if len(differences) >= MIN_SEEDS
    ]
    intervals = [interval for interval in intervals if interval.low is not None]
    better = sum(interval.low is not None and interval.low > 0 for interval in intervals)
    worse = sum(interval.high is not None and interval.high < 0 for interval in intervals)
    if not intervals:
        return "No setting has an interval yet."
    return (
        f"By the area at equal tokens, trees are better in {better} and worse in {worse} of the {len(intervals)}\n"
        "settings that have an interval; in the others nothing is shown."
    )


def _figure(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _differences() -> str:
    return f"""## Where the setting differs from theirs

"Theirs" is the code of PettingLLMs at commit a054fb1, not the paper's words.

{_table(DIFFERENCES[0], DIFFERENCES[1:])}
"""


def _small_model() -> str:
    return """## The small model

`--model small` is a Llama of under a million weights that `examples/benchmarks/small_model.py` makes once, from
transcripts of these games at their first level, of tasks that no benchmark has: the small model of [the small
study](small-study.md) knows only the words of its own games. Like that one it reads clean transcripts first and noisy
ones after them, whose teacher acts for the best in 4 to 70 % of its answers, by the game, and sometimes says what is no
move. A word is a token, and it reads the last message alone, so profiles and examples are for models that can read
them. Other levels it has never seen.

```sh
python -m examples.benchmarks.small_model .cache --measure    # makes it, and says how often it solves that level
```
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
