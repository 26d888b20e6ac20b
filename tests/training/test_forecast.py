"""Owns: what `train` says of a run before it starts, when it refuses to start, and when it ends for lack of signal.

- Collected rewards that are all alike, or so rare that two rounds would hardly meet one, are refused before a server
  starts, in one line with what to do and the flag; with the flag, and where runs differ, training begins.
- What reaches the loss counts: the team reward and its shaping. Runs that a round would leave out are in no group; a
  training without a call that it would learn from is refused.
- Two rounds in a row whose rewards moved nothing end the run; one does not, nor does a run that has learned all.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.school_rig import School, school_in
from support.tiny_policy import make_action, make_trajectory

from marft_bridge import cli
from marft_bridge.commands.status import status
from marft_bridge.common.errors import NoSignalError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import TrainOptions
from marft_bridge.runs.run_folder import read_forecast, read_metrics
from marft_bridge.training import train as training
from marft_bridge.training.forecast import (
    Forecast,
    forecast_to_advice,
    forecast_to_lines,
    forecast_to_refusal,
    penalties_to_lines,
    trajectories_to_forecast,
)
from marft_bridge.training.signal_check import SignalCheck, check_forecast
from trace_store.records import OF_LIMIT, RETOKENISED, Outcome, Reward, Trajectory
from trainers.config import TrainerOptions

GROUPS = {"samples_per_task": 4, "trainer": {"advantage": {"estimator": "grpo"}}}


def runs(rewards: Sequence[float], per_task: int = 1, **call: Any) -> list[Trajectory]:
    """Runs of one call, `per_task` of each task in a row."""
    made = []
    for n, value in enumerate(rewards):
        trajectory = make_trajectory([make_action("actor", [1], [2, 3], **call)], value, task_id=f"t{n // per_task}")
        made.append(replace(trajectory, episode=replace(trajectory.episode, episode_id=f"e{n}")))
    return made


def forecast_of(
    trajectories: Sequence[Trajectory], own: bool = True, nodes: Sequence[str] = ("actor",), **options: Any
) -> Forecast:
    own_ids = {t.episode.episode_id for t in trajectories} if own else set()
    return trajectories_to_forecast(trajectories, own_ids, nodes, options=TrainOptions.model_validate(options))


# -- what is refused ------------------------------------------------------------------------------------------


def test_a_graph_that_earns_in_one_of_two_hundred_runs_is_refused() -> None:
    forecast = forecast_of(runs([1.0] + [0.0] * 199))
    # Of 32 pairs, each with one of 2 * 0.005 to differ by the mean; Jeffreys' rule puts 1.5 in the place of 1.
    assert forecast.informative == pytest.approx(32 * 2 * 1.5 * 199.5 / (201 * 202), rel=0.02)
    refusal = forecast_to_refusal(forecast)
    assert refusal is not None
    assert "1 of 200 collected episodes earned more than the worst (0 to 1, 0.005 on average)" in refusal
    assert "about 0.5 of the 32 pairs of runs of a round will differ in reward" in refusal
    assert refusal.endswith("or train all the same with --without-signal")
    assert "\n" not in refusal


def test_the_threshold_is_where_two_groups_in_two_rounds_are_as_likely_as_not() -> None:
    # With a share s of 128 runs to come, and few, the number that differ is binomial in 64 pairs: 2 of 192 are too few.
    assert [forecast_to_refusal(forecast_of(runs([1.0] * n + [0.0] * (192 - n)))) is None for n in (2, 3)] == [
        False,
        True,
    ]


def test_a_healthy_graph_is_not_refused_and_told_its_groups() -> None:
    forecast = forecast_of(runs([1.0, 0.0, 0.0, 1.0] * 50, per_task=4), **GROUPS)
    assert forecast_to_refusal(forecast) is None
    assert forecast.informative == pytest.approx(16 * 7 / 8, rel=0.05)  # four runs at 1/2 differ with 1 - 2 / 16
    (line,) = forecast_to_lines(forecast)
    assert "runs of 50 of 50 tasks differ; about 13.7 " in line
    assert "of the 16 groups of 4 of a round" in line


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 10, 500])
def test_runs_that_all_earned_the_same_are_refused_however_many_they_are(value: float, count: int) -> None:
    forecast = forecast_of(runs([value] * count), episodes_per_round=4096)
    refusal = forecast_to_refusal(forecast)
    assert refusal is not None
    assert f"all {count} collected episodes earned the same ({value:g}" in refusal
    assert ("never more than 0" in refusal) == (value == 0)


def test_tasks_that_always_end_alike_are_refused_where_groups_are_compared_and_only_there() -> None:
    settled = runs([float(n // 4 % 2) for n in range(160)], per_task=4)
    assert forecast_to_refusal(forecast_of(settled, **GROUPS)) is not None
    assert forecast_to_refusal(forecast_of(settled)) is None  # a critic sees runs that differ


def lost(trajectory: Trajectory, outcome: Outcome = "failed", reason: str | None = "bad JSON") -> Trajectory:
    return replace(trajectory, episode=replace(trajectory.episode, outcome=outcome, reason=reason), rewards=())


def test_groups_are_as_small_as_the_runs_that_come_to_a_reward_leave_them() -> None:
    """Of 50 tasks of four runs, two right, all runs of 6 tasks end: s = 0.12. A group of four has both a right and a
    wrong run that ended in 1 - 2 (1 - s/2)^4 + (1 - s)^4 = 0.038 of cases, where rates are 1/2."""
    all_runs = runs([1.0, 0.0, 0.0, 1.0] * 50, per_task=4)
    seldom = [t if n < 24 else lost(t) for n, t in enumerate(all_runs)]
    forecast = forecast_of(seldom, **GROUPS)
    assert (forecast.stored, forecast.episodes, forecast.counted) == (200, 24, 24)
    assert forecast.informative == pytest.approx(16 * 0.038, rel=0.25)
    refusal = forecast_to_refusal(forecast)
    assert refusal is not None
    why = "176 of 200 episodes failed, were cut short or have no reward, most often: bad JSON"
    assert f"mend what they failed with, since {why}" in refusal
    assert f"{why}, so that a round learns from about 12% of its runs: mend what" in forecast_to_lines(forecast)[0]
    pairs = forecast_of([replace(t, episode=replace(t.episode, task_id=t.episode.episode_id)) for t in seldom])
    assert pairs.informative == pytest.approx(32 * 0.12 / 2, rel=0.1)  # of 7.7 runs that end, half of the pairs differ


@pytest.mark.parametrize(
    ("outcome", "reason", "advised"),
    [
        ("failed", "bad JSON", "mend what they failed with, since 30 of 40 episodes"),
        ("truncated", "recursion limit reached", "raise the limit that cut them (collect.timeout_s"),
        ("truncated", "recursion limit reached", "or say in graph.limit_reward what a run earns that comes to it"),
        ("truncated", "longer than 300 s", "or say in graph.limit_reward what a run earns that comes to it"),
        ("terminated", None, "have the reward judge every run, since 30 of 40 episodes"),
    ],
)
def test_what_is_to_be_done_of_lost_runs_goes_by_how_they_ended(
    outcome: Outcome, reason: str | None, advised: str
) -> None:
    trajectories = [lost(t, outcome, reason) if n % 4 else t for n, t in enumerate(runs([0.0] * 40))]
    assert advised in forecast_to_advice(forecast_of(trajectories))


def test_an_interrupt_is_no_limit_that_could_be_paid_for() -> None:
    trajectories = [lost(t, "truncated", "interrupted") if n % 4 else t for n, t in enumerate(runs([0.0] * 40))]
    assert "limit_reward" not in forecast_to_advice(forecast_of(trajectories))


def test_runs_whose_limit_is_paid_for_count_as_any_that_earned_it() -> None:
    """Of 40 runs 10 earn 0 and 30 come to a limit: so many pairs differ as where those 30 earned -1 by themselves."""
    whole = runs([-1.0 if n % 4 else 0.0 for n in range(40)])
    cut = [lost(t, "truncated", "recursion limit reached") if n % 4 else t for n, t in enumerate(whole)]
    paid = [t if t.rewards else replace(t, rewards=(Reward("e", "reward", -1.0, OF_LIMIT, 1),)) for t in cut]
    forecast = forecast_of(paid)
    assert forecast == forecast_of(whole)
    assert (forecast.lost, forecast.counted, forecast.better) == (0, 40, 10)
    assert forecast_to_refusal(forecast) is None
    assert forecast_to_refusal(forecast_of(cut)) is not None  # all that came to a reward earned the same


@pytest.mark.parametrize("options", [{}, GROUPS])
def test_runs_of_which_none_came_to_a_reward_are_refused(options: dict[str, Any]) -> None:
    refusal = forecast_to_refusal(forecast_of([lost(t) for t in runs([1.0] * 40)], **options))
    assert refusal is not None
    assert "none of the 40 collected episodes came to a reward" in refusal
    assert "mend what they failed with" in refusal


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"trainable": False, "untrainable_reason": "redacted"}, "(actor: redacted); docs/troubleshooting.md says"),
        ({"logprobs": None}, "(actor: no log-probs); docs/troubleshooting.md says"),
        ({"temperature": 0.0}, "(actor: sampled greedily or at an unknown temperature); have the app sample at a"),
        ({"top_p": 0.9}, "are not comparable); have the app leave out top_p and top_k"),
        ({"node": "ghost"}, "(actor: it never acts); look whether graph.nodes has the nodes that act"),
    ],
)
def test_calls_that_the_trainer_would_leave_out_are_refused_however_well_runs_differ(
    call: dict[str, Any], why: str
) -> None:
    unusable = [
        replace(t, actions=tuple(replace(action, **call) for action in t.actions)) for t in runs([1.0, 0.0] * 50)
    ]
    forecast = forecast_of(unusable)
    assert (forecast.counted, forecast.informative, forecast.nodes["actor"].usable) == (0, 0.0, 0)
    refusal = forecast_to_refusal(forecast)
    assert refusal is not None
    assert refusal.startswith(
        "train: the rounds would teach nothing: no call of the 100 collected episodes can be learned"
    )
    assert why in refusal
    assert refusal.endswith("or train all the same with --without-signal")
    assert forecast_to_refusal(replace(forecast, rounds=0)) is None  # no round learns from rewards
    # half of the runs have a call to learn from, and are in groups
    half = forecast_of([*unusable[:50], *runs([1.0, 0.0] * 50)[50:]])
    assert half.counted == 50
    assert half.informative == pytest.approx(32 / 2 / 2, rel=0.05)
    assert forecast_to_refusal(half) is None


def test_a_frozen_agent_s_calls_are_none_to_learn_from() -> None:
    frozen = {"agents": {"actor": {"frozen": True}}}
    both = [replace(t, actions=(*t.actions, replace(t.actions[0], node="critic"))) for t in runs([1.0, 0.0] * 50)]
    ids = {t.episode.episode_id for t in both}
    options = TrainOptions.model_validate({"trainer": frozen})
    assert forecast_to_refusal(trajectories_to_forecast(both, ids, ["actor", "critic"], options=options)) is None
    refusal = forecast_to_refusal(
        trajectories_to_forecast(runs([1.0, 0.0] * 50), ids, ["actor", "critic"], options=options)
    )
    assert refusal is not None
    assert "(critic: it never acts)" in refusal


def test_an_estimator_that_compares_within_a_task_is_judged_by_its_groups_though_it_needs_no_samples() -> None:
    """The calls of each run are paid alike, those of every other task otherwise: `mars2` compares neither."""
    paid = with_rewards(games(64, ("actor", "actor")), *[[float(n // 4 % 2)] * 2 for n in range(64)])
    trainer = {"advantage": {"estimator": "mars2"}, "offline": {"mode": "off"}, "shaping": PAID_BY_CALL}
    single = forecast_of(paid, trainer=trainer)
    assert (single.by_task, single.group_size, single.groups, single.informative) == (True, 1, 64, 0.0)
    refusal = forecast_to_refusal(single)
    assert refusal is not None
    assert "no run of a round is compared with another one of its task; " in refusal
    assert "take more samples of a task (train.samples_per_task)" in refusal
    differing = with_rewards(games(64, ("actor", "actor")), *[[float(n % 2)] * 2 for n in range(64)])
    assert forecast_to_refusal(forecast_of(differing, samples_per_task=4, trainer=trainer)) is None
    assert forecast_to_refusal(forecast_of(paid, samples_per_task=4, trainer=trainer)) is not None


def test_what_was_learned_before_the_rounds_from_others_is_reason_enough_to_begin() -> None:
    own = runs([0.0] * 40)
    others = [replace(t, episode=replace(t.episode, episode_id=f"x{n}")) for n, t in enumerate(runs([1.0] * 16))]
    own_ids = {t.episode.episode_id for t in own}

    def refusal(count: int, **options: Any) -> str | None:
        train = TrainOptions.model_validate(options)
        return forecast_to_refusal(trajectories_to_forecast([*own, *others[:count]], own_ids, ["actor"], options=train))

    assert refusal(16) is None
    assert refusal(15) is not None
    assert refusal(16, trainer={"offline": {"mode": "off"}}) is not None
    assert refusal(16, trainer={"offline": {"mode": "filtered", "threshold": 2.0}}) is not None


def test_rounds_that_cannot_be_judged_or_are_none_are_not_refused() -> None:
    assert forecast_to_refusal(forecast_of(runs([0.0] * 40), own=False)) is None
    assert forecast_to_refusal(forecast_of(runs([0.0] * 40), rounds=0)) is None
    for rounds, is_refused in ((2, False), (3, True)):  # a teacher teaches in the first two, whatever is earned
        taught = forecast_of(runs([0.0] * 40), rounds=rounds, teacher_rounds=2, teacher="larger")
        assert (forecast_to_refusal(taught) is not None) == is_refused


def test_shaping_that_differs_is_a_signal_where_it_counts() -> None:
    alike = runs([0.0] * 40)
    shaped = [
        replace(
            t,
            rewards=(*t.rewards, Reward(t.episode.episode_id, "style", n % 2, "test", 1, scope="agent", node="actor")),
        )
        for n, t in enumerate(alike)
    ]
    assert forecast_to_refusal(forecast_of(shaped)) is not None
    shaping = [{"reward": "style", "level": "agent", "weight": 0.5}]
    assert forecast_to_refusal(forecast_of(shaped, trainer={"shaping": shaping})) is None


def with_rewards(
    trajectories: Sequence[Trajectory], *values: Mapping[str, float] | Sequence[float], name: str = "paid"
) -> list[Trajectory]:
    """The same with a further reward: by node, or call by call."""
    paid = []
    for trajectory, value in zip(trajectories, values, strict=True):
        episode_id = trajectory.episode.episode_id
        if isinstance(value, Mapping):
            more = [Reward(episode_id, name, v, "test", 1, scope="agent", node=node) for node, v in value.items()]
        else:
            calls = zip(trajectory.actions, value, strict=True)
            more = [Reward(episode_id, name, v, "test", 1, scope="step", action_id=a.action_id) for a, v in calls]
        paid.append(replace(trajectory, rewards=(*trajectory.rewards, *more)))
    return paid


def games(count: int, calls: Sequence[str] = ("cross", "nought")) -> list[Trajectory]:
    """Games of a task each four times, that are all measured at 0.5."""
    made = []
    for n in range(count):
        trajectory = make_trajectory([make_action(node, [1], [2, 3]) for node in calls], 0.5, task_id=f"t{n // 4}")
        made.append(replace(trajectory, episode=replace(trajectory.episode, episode_id=f"e{n}")))
    return made


def test_what_one_side_wins_and_the_other_loses_is_a_signal_and_no_sparse_reward() -> None:
    """The sum of both is 0 in every game."""
    won = [{"cross": value, "nought": -value} for value in (1.0, -1.0, 0.0, 1.0) * 8]
    trainer = {
        "sides": {"cross": ["cross"], "nought": ["nought"]},
        "shaping": [{"reward": "paid", "level": "agent", "weight": 0.5}],
        "advantage": {"estimator": "at_grpo"},
    }
    options: dict[str, Any] = {"nodes": ("cross", "nought"), "samples_per_task": 4, "trainer": trainer}
    forecast = forecast_of(with_rewards(games(32), *won), **options)
    assert forecast.better == 32  # whoever lost, the other one did not: only cross at -1 and nought at -1 are the worst
    assert forecast_to_refusal(forecast) is None
    (line, *_) = forecast_to_lines(forecast)
    assert "in 32 of 32 collected episodes a side earned more than its worst (the game was measured at 0.5 to" in line
    assert "partial credit" not in forecast_to_advice(forecast)
    never = forecast_of(with_rewards(games(32), *won[:1] * 32), **options)
    assert never.better == 0
    assert forecast_to_refusal(never) is not None


PAID_BY_CALL = [{"reward": "paid", "level": "step", "weight": 1.0}]


@pytest.mark.parametrize(
    ("estimator", "by_call", "is_refused"),
    [
        ("grpo", [0.0, -1.0], True),  # samples of a task that all earned the same
        ("hrpo", [0.0, 1.0], False),  # the second call is paid as it is
        ("hrpo", [0.0, -1.0], True),  # with negative_weight 0 nothing is pushed down
        ("hrpo", [0.0, 0.0], True),
        ("mars2", [0.0, -1.0], False),  # the calls of a run are held against each other
        ("mars2", [-1.0, -1.0], True),
    ],
)
def test_runs_that_all_earned_the_same_are_not_refused_where_the_estimator_learns_from_one_alone(
    estimator: str, by_call: list[float], is_refused: bool
) -> None:
    alike = with_rewards(games(32, ("actor", "actor")), *[by_call] * 32)
    trainer = {"advantage": {"estimator": estimator}, "shaping": PAID_BY_CALL}
    if estimator == "grpo":  # which takes no rewards of calls at several depths
        trainer |= {"shaping": []}
    forecast = forecast_of(alike, samples_per_task=4, trainer=trainer)
    assert (forecast_to_refusal(forecast) is not None) is is_refused
    assert forecast.alone == (0 if is_refused else 32)
    assert ("32 of 32 episodes teach by themselves" in forecast_to_lines(forecast)[0]) is not is_refused


@pytest.mark.parametrize(
    ("estimator", "weight", "negative_weight", "is_said"),
    [("hrpo", -0.5, 0.0, True), ("hrpo", -0.5, 0.1, False), ("hrpo", 0.5, 0.0, False), ("dr_mas", -0.5, 0.0, False)],
)
def test_penalties_of_calls_that_push_nothing_down_are_told_before_training(
    estimator: str, weight: float, negative_weight: float, is_said: bool
) -> None:
    trainer = {
        "advantage": {"estimator": estimator},
        "objective": {"negative_weight": negative_weight},
        "shaping": [{"reward": "idle", "level": "step", "weight": weight}],
    }
    lines = penalties_to_lines(TrainerOptions.model_validate(trainer))
    assert [("'idle'" in line, "set negative_weight above 0" in line) for line in lines] == [(True, True)] * is_said


@pytest.mark.parametrize(("normalize", "is_refused"), [("none", False), ("agent", True)])
def test_a_running_mean_that_nothing_normalises_learns_from_runs_that_all_earned_the_same(
    normalize: str, is_refused: bool
) -> None:
    forecast = forecast_of(runs([1.0] * 40), trainer={"advantage": {"estimator": "rae", "normalize": normalize}})
    assert (forecast_to_refusal(forecast) is not None) is is_refused


# -- what is advised ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trajectories", "options", "advised"),
    [
        (runs([0.0] * 40), {}, {"partial credit", "stronger model", "easier"}),
        (runs([0.0] * 40, finish_reason="length"), {}, {"partial credit", "longer", "stronger model", "easier"}),
        (runs([1.0] * 40), {}, {"tell runs apart"}),
        (runs([1.0] * 190 + [0.0] * 2), {}, {"tell runs apart"}),  # nearly all is learned
        (runs([1.0] * 190 + [0.0] * 2, per_task=4), GROUPS, {"tell runs apart"}),
        (runs([0.5] * 191 + [-100.0]), {}, {"tell runs apart"}),  # one crash makes no others good
        (runs([0.0] * 188 + [1.0] * 3 + [-100.0]), {}, {"partial credit", "train.episodes_per_round", "easier"}),
        (runs([1.0] + [0.0] * 199), {}, {"partial credit", "train.episodes_per_round", "stronger model", "easier"}),
        (runs([1.0] * 4 + [0.0] * 12, per_task=4), GROUPS, {"train.samples_per_task", "stronger model", "easier"}),
        (runs([1.0] * 80 + [0.0] * 80, per_task=4), GROUPS, {"train.samples_per_task"}),
    ],
)
def test_the_advice_follows_from_what_is_lacking(
    trajectories: list[Trajectory], options: dict[str, Any], advised: set[str]
) -> None:
    advice = forecast_to_advice(forecast_of(trajectories, **options))
    every = {
        *("partial credit", "longer", "tell runs apart", "train.samples_per_task", "train.episodes_per_round"),
        *("stronger model", "easier"),
    }
    assert {part for part in every if part in advice} == advised


def test_a_node_has_a_line_where_there_is_something_to_say_of_it() -> None:
    mixed = runs([0.0, 1.0] * 20, finish_reason="stop")
    cut = runs([0.0, 1.0] * 20, finish_reason="length")
    hosted = runs([0.0, 1.0] * 20, trainable=False, untrainable_reason="no token ids", finish_reason="stop")
    lines = [forecast_to_lines(forecast_of(trajectories))[1:] for trajectories in (mixed, [*mixed, *cut], hosted)]
    assert lines == [
        [],
        ["forecast, actor: 50% of its calls were cut at the limit of tokens (sampling.max_tokens)"],
        ["forecast, actor: rounds learn nothing from 100% of its calls: no token ids"],
    ]
    options = TrainOptions()
    by_others = [replace(t, actions=(replace(t.actions[0], node="critic"),)) for t in mixed[1:]]
    ids = {t.episode.episode_id for t in mixed}
    (_, line) = forecast_to_lines(
        trajectories_to_forecast([*by_others, mixed[0]], ids, ["actor", "critic"], options=options)
    )
    assert line.startswith("forecast, actor: it acts in 2% of the episodes, so that about 0.4 of these pairs")
    (_, line) = forecast_to_lines(trajectories_to_forecast(mixed, {"e0", "e1"}, ["critic"], options=options))
    assert line == "forecast, critic: no call of it is stored, so nothing is known of what it can learn"


def test_calls_that_the_offline_phase_imitates_are_not_called_useless() -> None:
    hosted = runs([0.0, 1.0] * 20, trainable=False, untrainable_reason=RETOKENISED, finish_reason="stop")
    imitated = forecast_to_lines(forecast_of(hosted, trainer={"offline": {"mode": "filtered", "retokenise": True}}))
    ignored = forecast_to_lines(forecast_of(hosted, trainer={"offline": {"mode": "filtered"}}))
    assert [len(imitated), len(ignored)] == [1, 2]
    assert RETOKENISED in ignored[1]


def test_episodes_that_failed_are_counted_with_the_commonest_reason() -> None:
    scored = runs([0.0, 1.0] * 20)
    failed = [
        replace(t, episode=replace(t.episode, episode_id=f"f{n}", outcome="failed", reason="timeout"))
        for n, t in enumerate(runs([1.0] * 10))
    ]
    forecast = forecast_of([*scored, *failed])
    assert (forecast.stored, forecast.episodes, forecast.lost) == (50, 40, 10)
    assert (
        "; 10 of 50 episodes failed, were cut short or have no reward, most often: timeout"
        in forecast_to_lines(forecast)[0]
    )


# -- rounds ---------------------------------------------------------------------------------------------------


def metrics(
    steps: int | None = 2, flat_groups: float | None = None, stopped_early: bool = False, replayed: int = 0
) -> dict[str, Any]:
    agent = {} if steps is None else {"steps": steps, "stopped_early": stopped_early}
    return {"agents": {"actor": agent}, "critic": {"flat_groups": flat_groups}, "replayed": replayed}


def check(goes_on: bool = False, **options: Any) -> SignalCheck:
    train = TrainOptions.model_validate(options)
    return SignalCheck(forecast_of(runs([0.0, 1.0])), ("actor",), train, goes_on=goes_on)


@pytest.mark.parametrize(
    ("figures", "rewards", "expected"),
    [
        (metrics(), [0, 1], True),
        (metrics(), [1, 1], False),  # what moved the adapter was no reward
        (metrics(flat_groups=1.0), [0, 1], False),
        (metrics(flat_groups=0.9), [0, 1], True),
        (metrics(steps=0), [0, 1], False),
        (metrics(steps=0, stopped_early=True), [0, 1], True),
        ({"agents": {}, "critic": {"flat_groups": 1.0}}, [0, 0], False),
    ],
)
def test_a_round_has_signal_where_its_rewards_differ_and_moved_an_adapter(
    figures: dict[str, Any], rewards: list[float], expected: bool
) -> None:
    assert check().has_signal(figures, runs(rewards)) is expected


SUCCESSES = {"advantage": {"estimator": "grpo"}, "replay": {"successes": 0.3}}
BEFORE = {"advantage": {"estimator": "grpo"}, "replay": {"share": 0.3}}
RUNNING_MEAN = {"advantage": {"estimator": "rae", "normalize": "none"}}


@pytest.mark.parametrize(
    ("trainer", "figures", "rewards", "expected"),
    [
        # all fresh runs failed, and a success of before was joined to them: it teaches, whatever the groups say
        (SUCCESSES, metrics(flat_groups=1.0, replayed=1), [0, 0, 1], True),
        (SUCCESSES, metrics(flat_groups=1.0, replayed=0), [0, 1], False),
        (SUCCESSES, metrics(flat_groups=1.0, replayed=1), [0, 0, 0], False),
        (BEFORE, metrics(flat_groups=1.0, replayed=1), [0, 0, 1], False),  # compared in groups as the fresh ones are
        # calls that are compared inside runs which earned the same
        ({"advantage": {"estimator": "grpo"}}, metrics(flat_groups=0.5), [1, 1], True),
        # above the mean of earlier rounds
        (RUNNING_MEAN, metrics(), [1, 1], True),
        ({"advantage": {"estimator": "rae"}}, metrics(), [1, 1], False),
    ],
)
def test_a_round_has_signal_by_what_its_estimator_compares(
    trainer: dict[str, Any], figures: dict[str, Any], rewards: list[float], expected: bool
) -> None:
    assert check(trainer=trainer).has_signal(figures, runs(rewards)) is expected


@pytest.mark.parametrize(
    ("signals", "ends"),
    [
        ([False], False),
        ([True, False], False),
        ([False, True], False),
        ([False, False], True),
        ([False, False, True], False),
        ([True, False, False], True),
    ],
)
def test_two_rounds_in_a_row_without_signal_end_the_run_and_one_does_not(signals: list[bool], ends: bool) -> None:
    lines: list[Mapping[str, Any]] = [{"phase": "offline", "round": 0}]
    lines += [{"phase": "online", "round": n, "signal": signal} for n, signal in enumerate(signals, start=1)]
    last_round = runs([0.0] * 6)
    check(goes_on=True).refuse_silence(lines, last_round)
    if not ends:
        check().refuse_silence(lines, last_round)
        return
    with pytest.raises(NoSignalError, match=f"rounds {len(signals) - 1} and {len(signals)} taught nothing"):
        check().refuse_silence(lines, last_round)
    check().refuse_silence(lines, runs([1.0] * 6))  # all is learned: each earned the best that was collected


@pytest.mark.parametrize(
    ("best_of_others", "rewards", "ends"),
    [
        (1.0, [1.0] * 6, False),  # as good as what was imitated: nothing is left to learn
        (1.0, [1.0] * 5 + [0.5], True),
        (0.0, [0.0] * 6, True),  # a reward that is never above nothing tells nothing
        (None, [1.0] * 6, True),  # nobody knows whether that is the best
    ],
)
def test_an_app_that_does_as_well_as_the_runs_it_imitated_is_not_ended_for_lack_of_signal(
    best_of_others: float | None, rewards: list[float], ends: bool
) -> None:
    silent: list[Mapping[str, Any]] = [{"phase": "online", "round": n, "signal": False} for n in (1, 2)]
    nothing_of_its_own = forecast_of([])
    signal_check = replace(check(), forecast=nothing_of_its_own, best_of_others=best_of_others)
    with pytest.raises(NoSignalError, match="taught nothing") if ends else nullcontext():
        signal_check.refuse_silence(silent, runs(rewards))


# -- the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


def test_a_constant_reward_is_refused_before_a_server_starts(
    school: School, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    school.server.answer = lambda _: "no"
    school.collect()

    def open_nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError("a server was started in vain")

    monkeypatch.setattr(training, "open_session", open_nothing)
    with pytest.raises(NoSignalError, match=r"all 20 collected episodes earned the same \(0, never more") as raised:
        school.train()
    assert raised.value.exit_code == 1
    record = read_forecast(school.run / "metrics.jsonl")
    assert record is not None
    assert (record["phase"], record["better"], record["without_signal"]) == ("forecast", 0, False)
    status(school.config(), Reporter(Console(width=300)))
    assert "  forecast: all 20 collected episodes earned the same" in capsys.readouterr().out


@pytest.mark.slow
def test_with_the_flag_it_is_trained_on_and_what_is_resumed_is_not_asked_again(school: School) -> None:
    school.server.answer = lambda _: "no"
    school.collect()
    with pytest.raises(NoSignalError):
        school.train()
    record = read_forecast(school.run / "metrics.jsonl")
    assert record is not None
    output = school.train(without_signal=True, rounds=2)
    assert "\nforecast: all 20" in output
    assert "trained reasoner@3, actor@3" in output
    resumed = school.train(resume=True, rounds=3)
    assert "forecast" not in resumed
    assert "trained reasoner@4, actor@4" in resumed
    lines = read_metrics(school.run / "metrics.jsonl")
    assert [(line["round"], line.get("signal")) for line in lines] == [(0, None), (1, False), (2, False), (3, False)]
    assert read_forecast(school.run / "metrics.jsonl") == record | {"without_signal": True, "rounds": 3}


@pytest.mark.slow
def test_two_rounds_without_signal_end_training_and_keep_what_was_trained(school: School) -> None:
    school.server.answer = lambda body: "yes" if body["model"].endswith("@0") and school_number(body) % 2 else "no"
    school.collect()
    with pytest.raises(NoSignalError, match=r"rounds 1 and 2 taught nothing: .*; or go on all the same with --resume"):
        school.train(rounds=3)
    assert (school.run / "adapters/actor/3").is_dir()
    assert [line["round"] for line in read_metrics(school.run / "metrics.jsonl")] == [0, 1, 2]
    assert "trained reasoner@4, actor@4" in school.train(resume=True, rounds=3, without_signal=True)


def school_number(body: Mapping[str, Any]) -> int:
    """The number of the task that a call is about."""
    return int(body["messages"][-1]["content"].split()[0])


def test_what_the_base_model_earned_refuses_no_run_that_begins_from_another_ones_adapters(
    school: School, tmp_path: Path
) -> None:
    school.server.answer = lambda _: "no"
    school.collect()
    with school.store() as store:
        collected = list(store.trajectories())
    own_ids = {each.episode.episode_id for each in collected}
    text = io.StringIO()

    def checked(**options: Any) -> SignalCheck:
        return check_forecast(
            school.config(**options),
            collected,
            own_ids,
            resume=False,
            without_signal=False,
            reporter=Reporter(Console(file=text, width=300)),
        )

    with pytest.raises(NoSignalError):
        checked()
    assert checked(start_from=str(tmp_path / "stage-one")).goes_on is False  # silent rounds end it all the same
    assert text.getvalue().count("forecast: all 20 collected episodes earned the same") == 2


def test_the_flag_is_a_flag_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--help"]) == 0
    assert "--without-signal" in capsys.readouterr().out
