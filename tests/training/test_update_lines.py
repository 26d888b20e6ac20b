"""Owns: what is said of an update (`update_lines`).

- The figures of a round are those worked by hand; one that is not known is a dash, never 0.
- Of what a round has no metrics nothing is said.
"""

from __future__ import annotations

from typing import Any

from support.fork_toys import run
from support.tiny_trajectory import trajectory

from marft_bridge.config.bridge import TrainOptions
from marft_bridge.training.update_lines import LearnedRound, offline_to_lines, round_to_figures, round_to_lines

OPTIONS = TrainOptions(rounds=5)
METRICS: dict[str, Any] = {
    "agents": {"a": {"approx_kl": 0.25, "clipfrac": None}, "b": {"approx_kl": 0.5, "clipfrac": 0.125}},
    "seconds": {"score": 1.25, "update": 2.5, "teacher": None},
    "wasted_rollouts": 0.5,
}


def test_the_line_of_a_round_has_the_figures_worked_by_hand() -> None:
    whole_runs = [run("x", [("a", 1)], 1.0), run("y", [("a", 2)], 0.5), trajectory("of no reward")]
    learned = LearnedRound(2, whole_runs, (), metrics=METRICS)
    assert list(round_to_lines(learned, OPTIONS)) == [
        "round 2/5: reward 0.750 over 2 episodes, 50% wasted; "
        "a@3: KL 0.250 clip -  b@3: KL 0.500 clip 0.125; update 4 s; rounds left: 3"
    ]
    assert round_to_figures(learned, OPTIONS) == "reward 0.750  KL 0.500"


def test_what_is_not_known_of_a_round_is_a_dash() -> None:
    metrics = METRICS | {"agents": {"a": {}}, "wasted_rollouts": None}
    learned = LearnedRound(1, [trajectory("of no reward")], (), metrics=metrics)
    (line,) = round_to_lines(learned, OPTIONS)
    assert line.startswith("round 1/5: reward - over 0 episodes, - wasted; a@2: KL - clip -; ")
    assert round_to_figures(learned, OPTIONS) == "reward -  KL -"


def test_what_is_odd_about_the_offline_phase_is_said() -> None:
    replay = {"mode": "off", "used": 0, "agents": {}, "warnings": ["adapter 'a' kept nothing"]}
    line = {"phase": "offline", "warm_up": {"critic": {"explained_variance": None}}, "replay": replay}
    assert list(offline_to_lines(line, 12))[-1] == "offline: adapter 'a' kept nothing"


def test_the_offline_phase_says_what_it_learned_from() -> None:
    line = {
        "phase": "offline",
        "warm_up": {"critic": {"explained_variance": None}},
        "replay": {"mode": "off", "used": 0, "agents": {}},
    }
    assert list(offline_to_lines(line, 12)) == [
        "offline: critic explains - of the variance; off replay of 0 actions from 12 stored episodes"
    ]
