"""Owns: `compare --opponents`: every two versions on the same tasks and both seats, and what the reports say of it.

Variants that are declared play too, where they are adapter versions of the configuration and nothing else. Payoffs are
those that training pays; a game without one on both sides is left out and counted; no rating is infinite.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.compare_rig import Lab, lab_in
from support.sample_report import HOSTILE, bare_report
from support.snippets import line_to_words, shown_commands
from support.tiny_policy import make_action, make_trajectory

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.markdown import report_to_markdown
from marft_bridge.comparison.page import report_page
from marft_bridge.comparison.records import Match, Rated, Report, Tournament
from marft_bridge.comparison.table import report_table
from marft_bridge.comparison.tournament import trajectory_to_payoffs
from marft_bridge.config.compare import text_to_opponents
from trace_store.records import Reward
from trace_store.store import TraceStore
from trainers.config import TrainerOptions

GAME = '''

def duel(task, state):
    """Whoever named the larger number gets what it is larger by from the other. `correct` is that both are numbers."""
    first, second = (None if word == "none" else float(word) for word in state["log"])
    paid = {} if None in (first, second) else {"agent:reasoner": first - second, "agent:actor": second - first}
    return {"correct": 1.0, "payoff": paid or None}
'''

TOML = """
run = "{run}"

[graph]
app = "{apps}:duo"
nodes = ["reasoner", "actor"]
tasks = "{apps}:tasks"
task_to_input = "{apps}:to_input"
reward = "{apps}:duel"

[model]
path = "{model}"

[serve]
attach = "{url}"

[train]
samples_per_task = 4

[train.trainer]
reward = "correct"
shaping = [{{ reward = "payoff", level = "agent", weight = 0.5 }}]
offline = {{ mode = "off" }}

[train.trainer.sides]
thinker = ["reasoner"]
doer = ["actor"]

[train.trainer.advantage]
estimator = "at_grpo"

[compare]
tasks = 12
mixed_teams = "auto"
kl_actions = 0
{more}
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as opened:
        opened.apps.write_text(opened.apps.read_text() + GAME)
        opened.answer = newer_wins
        yield opened


def version_of(model: str) -> int:
    return int(model.rpartition("@")[2]) if "@" in model else 0


def newer_wins(model: str, number: int) -> str:
    """The newer version names the larger number on three tasks of four; on the fourth it is the other way round."""
    return str(version_of(model) if number % 4 else -version_of(model))


def write_toml(lab: Lab, more: str = "") -> Path:
    path = lab.folder / "bridge.toml"
    path.write_text(TOML.format(run=lab.run, apps=lab.apps, model=lab.model, url=lab.ours.url, more=more))
    return path


def command(lab: Lab, *flags: str, more: str = "") -> int:
    return cli.run(["compare", "--config", str(write_toml(lab, more)), *flags])


def read_report(lab: Lab) -> Report:
    return Report.model_validate_json((lab.run / "report.json").read_text())


def test_two_versions_meet_on_both_seats_of_every_task_and_the_elo_is_that_of_their_wins(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(lab, "--opponents", "base") == 0
    report = read_report(lab)
    assert [variant.name for variant in report.variants] == ["before", "after"]  # base is `before`, not another player
    played = report.tournament
    assert played is not None
    tasks = {number for _, number, _ in lab.asked}
    lost = sum(number % 4 == 0 for number in tasks)
    assert len(tasks) == 12
    assert 0 < lost < 12
    assert played.sides == ("thinker", "doer")
    assert [(m.first, m.second, m.won, m.drawn, m.lost) for m in played.matches] == [
        ("before", "after", lost, 0, 12 - lost),
        ("after", "before", 12 - lost, 0, lost),
    ]
    # What it wins by is 2 - 0, times the weight of the shaping.
    assert played.matches[1].payoff_first == pytest.approx(2 * 0.5 * (12 - 2 * lost) / 12)
    base, after = played.ratings
    assert (base.elo, base.low, base.high) == (0, None, None)
    assert after.elo == pytest.approx(400 * math.log10((12 - lost) / lost))
    assert (after.won, after.drawn, after.lost) == (2 * (12 - lost), 0, 2 * lost)
    assert after.low is not None
    assert after.high is not None
    assert after.low < after.elo < after.high
    said = " ".join(capsys.readouterr().out.split())
    assert f"Elo: after +{after.elo:.0f} (" in said
    for name in ("report.md", "report.html"):
        assert f"+{after.elo:.0f} (" in (lab.run / name).read_text()


@pytest.mark.slow
def test_the_command_of_the_page_has_all_versions_play_each_other_on_the_same_tasks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = (line for line in shown_commands("docs/comparison.md") if "--opponents" in line)
    write_toml(lab)
    monkeypatch.chdir(lab.folder)
    assert cli.run([*line_to_words(line)[1:], "--tasks", "3"]) == 0
    report = read_report(lab)
    assert [variant.name for variant in report.variants] == ["before", "after", "version 1"]
    assert report.tournament is not None
    names = {"before": 0, "after": 2, "version 1": 1}
    pairs = {(match.first, match.second) for match in report.tournament.matches}
    assert pairs == {(a, b) for a in names for b in names if a != b}
    games = Counter()
    with TraceStore.open(lab.run / "store.duckdb") as store:
        for trajectory in store.trajectories(run_ids=["compare-1"]):
            episode = trajectory.episode
            versions = (episode.adapters["reasoner"], episode.adapters["actor"])
            games[versions, episode.task_id, episode.seed] += 1
    assert set(games.values()) == {1}
    assert len({(task, seed) for _, task, seed in games}) == 3
    assert len({versions for versions, _, _ in games}) == 9  # each with itself, as a variant, and with each other
    asked = len(lab.asked)
    # 0 and 2 play anyway. Too few tasks to promote; that `after` is meant needs no saying.
    assert command(lab, "--opponents", "1,2", "--tasks", "3", "--resume", "--promote-if", "correct>0") == 4
    assert len(lab.asked) == asked
    assert command(lab, "--tasks", "3", "--resume") == 2  # another plan


def test_declared_versions_play_too_under_their_own_names(lab: Lab) -> None:
    tables = '[[compare.variants]]\nname = "start"\n[[compare.variants]]\nname = "end"\nadapters = "newest"'
    assert command(lab, "--opponents", "1,base", "--tasks", "3", "--promote-if", "correct>0", more=tables) == 4
    report = read_report(lab)
    assert [variant.name for variant in report.variants] == ["start", "end", "version 1"]
    assert report.tournament is not None
    assert len(report.tournament.matches) == 3 * 2
    assert report.tournament.ratings[0].elo == 0


def test_equal_players_are_equal_and_who_loses_everything_is_finite_without_an_interval(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.answer = lambda model, number: str(max(1, version_of(model)))  # 0 and 1 are alike, 2 beats both
    assert command(lab, "--opponents", "1", "--tasks", "3") == 0
    played = read_report(lab).tournament
    assert played is not None
    before, after, other = played.ratings
    assert not played.finite
    assert before.elo == pytest.approx(0)
    assert other.elo == pytest.approx(0)
    assert math.isfinite(after.elo)
    assert after.elo > 100
    assert {(row.low, row.high) for row in played.ratings} == {(None, None)}
    assert (before.won, before.drawn, before.lost) == (0, 6, 6)
    assert "Somebody won or lost everything" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_game_without_a_payoff_is_left_out_and_counted(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.answer = lambda model, number: "none" if number % 5 == 0 and model == "actor@2" else newer_wins(model, number)
    assert command(lab, "--opponents", "base") == 0
    played = read_report(lab).tournament
    assert played is not None
    missing = len({number for _, number, _ in lab.asked if number % 5 == 0})
    assert played.left_out == missing > 0
    assert [match.won + match.drawn + match.lost for match in played.matches] == [12 - missing, 12]
    lab.answer = lambda model, number: "none"
    assert command(lab, "--opponents", "base") == 0
    assert read_report(lab).tournament is None
    assert "no ratings: two variants have no game in which both sides have a payoff" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_game_that_ended_without_the_metric_is_rated_by_its_payoffs(lab: Lab) -> None:
    """A measure of the moves may not exist in games in which a side made none: who won them is known all the same."""
    text = lab.apps.read_text()
    assert '"correct": 1.0, "payoff"' in text
    lab.apps.write_text(text.replace('"correct": 1.0, "payoff"', '"correct": 1.0 if second >= 0 else None, "payoff"'))
    assert command(lab, "--opponents", "base") == 0
    report = read_report(lab)
    lost = len({number for _, number, _ in lab.asked if number % 4 == 0})
    assert {variant.name: variant.unscored for variant in report.variants} == {"before": 0, "after": lost}
    assert report.tournament is not None
    assert report.tournament.left_out == 0
    assert report.tournament.matches[0].won == lost > 0  # where `after` is second, and names a number below 0


@pytest.mark.parametrize(
    ("more", "flags", "message"),
    [
        ("stop_early = true", [], "compare --opponents does not go with compare.stop_early"),
        ('mixed_candidate = "after"', [], "compare --opponents does not go with compare.mixed_candidate"),
        (
            '[[compare.variants]]\nname = "a"\n[[compare.variants]]\nname = "b"\nadapters = 2\nmax_tokens = 9',
            [],
            "compare --opponents: variant 'b' has a graph, model, prompts or max_tokens of its own, and a tournament",
        ),
        (
            '[[compare.variants]]\nname = "a"\n[[compare.variants]]\nname = "version 1"\nadapters = 2',
            [],
            "compare.variants: 'version 1' is the name of an opponent; choose another",
        ),
        ("", ["--opponents", "1,,2"], "compare --opponents: '' is no version"),
        ("", ["--opponents", "7"], "node 'reasoner' has no adapter v7"),
    ],
)
def test_what_a_tournament_cannot_do_is_refused_in_one_line(
    more: str, flags: list[str], message: str, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(lab, *(flags or ["--opponents", "1"]), more=more) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not lab.asked


def test_a_graph_without_two_sides_has_no_tournament(lab: Lab) -> None:
    from marft_bridge.comparison.command import VersionFlags

    with pytest.raises(ConfigError, match=r"between two sides, and train\.trainer\.sides names 0"):
        lab.compare(flags=VersionFlags(opponents=(1,)))


def test_opponents_are_typed_with_commas_and_base_is_version_0() -> None:
    assert text_to_opponents("compare --opponents", "base, 3,best,newest") == (0, 3, "best", "newest")


def test_a_side_earns_all_shaping_of_its_agents_by_weight_and_a_side_without_any_is_absent() -> None:
    """The first side: 2 * 0.5 by itself, and steps 3 and -1 by 0.1 in its two calls. The second: a step of 5."""
    options = TrainerOptions.model_validate(
        {
            "reward": "legal",
            "shaping": [
                {"reward": "payoff", "level": "agent", "weight": 0.5},
                {"reward": "tip", "level": "step", "weight": 0.1},
            ],
            "sides": {"one": ["a"], "two": ["b"]},
            "advantage": {"estimator": "at_grpo"},
            "offline": {"mode": "off"},
        }
    )
    trajectory = make_trajectory([make_action(node, [1], [2]) for node in "aba"], 1.0)
    episode = trajectory.episode.episode_id
    tips = [
        Reward(episode, "tip", value, "test", 0, scope="step", action_id=action.action_id)
        for action, value in zip(trajectory.actions, (3.0, 5.0, -1.0), strict=True)
    ]
    own = Reward(episode, "payoff", 2.0, "test", 0, scope="agent", node="a")
    paid = trajectory_to_payoffs(replace(trajectory, rewards=(*trajectory.rewards, own, *tips)), options)
    assert paid == pytest.approx({"one": 1.0 + 0.3 - 0.1, "two": 0.5})
    assert trajectory_to_payoffs(replace(trajectory, rewards=(own,)), options) == {"one": 1.0}


def test_hostile_names_of_sides_and_variants_stay_text_and_a_report_reads_back_as_it_was() -> None:
    fields: dict[str, Any] = bare_report().model_dump(exclude_computed_fields=True)
    names = [variant["name"] for variant in fields["variants"]]
    rated = [
        Rated(variant=name, elo=7.0 * i, low=None, high=None, won=1, drawn=1, lost=1) for i, name in enumerate(names)
    ]
    matches = [
        Match(first=a, second=b, won=1, drawn=1, lost=1, payoff_first=0.5, payoff_second=-0.5)
        for a, b in (names, names[::-1])
    ]
    fields["tournament"] = Tournament(
        sides=(HOSTILE, "second"), ratings=tuple(rated), finite=False, matches=tuple(matches), left_out=2
    )
    report = Report.model_validate(fields)
    page, text = report_page(report), report_to_markdown(report)
    assert "<script>alert(1)" not in page
    assert "<h2>Tournament</h2>" in page
    assert "## Tournament" in text
    assert "\n# head" not in text
    assert "Tournament" not in report_page(bare_report()) + report_to_markdown(bare_report())
    assert report_table(report).caption is not None
    assert Report.model_validate(json.loads(report.model_dump_json())) == report
    fields["tournament"] = fields["tournament"].model_copy(
        update={"ratings": (rated[0], rated[1].model_copy(update={"variant": "nobody"}))}
    )
    with pytest.raises(ValueError, match="'nobody' is not one of the variants"):
        Report.model_validate(fields)
