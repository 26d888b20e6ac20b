"""Owns: what all graphs of the zoo have in common, and the rig that their own tests train them with.

- Every file of examples/zoo/, and team_in_one, is a configuration as it stands, says what figures to expect, and keeps
  whole tasks apart.
- docs/zoo.md is what the first lines of these files say; the line of a run is read from its report.
- The rig trains: where reward depends on what a node says, its adapter is pulled towards what paid; without a
  learning rate worth its name nothing moves.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pages.zoo_page import (
    INTRO,
    NOT_TRAINED,
    OWN_FOLDERS,
    PAGE,
    config_to_entry,
    config_to_name,
    configs,
    entries_to_page,
    written,
)
from support.paths import ROOT
from support.sample_report import bare_report
from support.zoo_answers import DUO, sometimes_right
from support.zoo_rig import ZOO, train_zoo

from examples.zoo.exploitability import Compared, Exploitability, Habits
from examples.zoo.run import (
    OPPONENTS,
    SHOWN,
    TWINS,
    config_to_moved,
    main,
    report_to_line,
    tournament_to_parts,
    write_expected,
)
from examples.zoo.twins import scores_to_line, write_line
from marft_bridge.comparison.records import Contrast, Match, NonInferiority, Rated, Report, Tournament
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rollouts.app import load_app
from marft_bridge.runs.learning_curve import LearningPoint


@pytest.mark.parametrize("path", configs(), ids=config_to_name)
def test_a_configuration_of_the_zoo_loads_with_enough_different_tasks(path: Path) -> None:
    config = toml_to_config(path)
    app = load_app(config)
    ids = [str(task["id"]) for task in (*app.train_tasks, *app.heldout_tasks)]
    assert len(set(ids)) == len(ids) >= 100
    assert len(app.heldout_tasks) >= 20
    assert re.search(r"^# Expected: \S", path.read_text(), re.MULTILINE)


def test_the_page_says_what_the_configurations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == written()


def test_the_readme_counts_the_configurations_of_the_page() -> None:
    assert f"[{len(configs())} graphs](docs/zoo.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_an_example_with_a_folder_of_its_own_is_called_after_it_and_named_by_its_own_files() -> None:
    (page,) = (entries_to_page([config_to_entry(path)]) for path in OWN_FOLDERS)
    assert "\n## team_in_one\n" in page
    assert "`examples/team_in_one/app.py`, `examples/team_in_one/bridge.toml`\n" in page
    named = re.findall(r"^After .*`(\S+)`, `(\S+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == len(configs())
    assert all((ROOT / path).is_file() for row in named for path in row)


def test_a_configuration_without_figures_is_listed_and_counted_as_not_trained(tmp_path: Path) -> None:
    trained = config_to_entry(ZOO / "defer.toml")
    text = (ZOO / "defer.toml").read_text(encoding="utf-8")
    path = tmp_path / "waits.toml"
    path.write_text(re.sub(r"(?m)^# Expected: .*", f"# Expected: {NOT_TRAINED}", text), encoding="utf-8")
    page = entries_to_page([trained, config_to_entry(path)])
    assert "1 of 1 are shown better, 0 worse." in page
    assert [line for line in page.splitlines() if line.startswith("| [")] == [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| [defer]")
    ]
    assert "Not trained yet on the real model: [waits](#waits)." in page
    assert f"\n- expected: {NOT_TRAINED}\n" in page
    path.write_text(re.sub(r"(?m)^# Expected: .*", "# Expected: much", text), encoding="utf-8")
    with pytest.raises(ValueError, match="has no figures"):
        entries_to_page([config_to_entry(path)])


def test_figures_of_a_graph_that_was_mended_since_are_marked_until_it_is_run_anew(tmp_path: Path) -> None:
    path = tmp_path / "mended.toml"
    path.write_text((ZOO / "compact.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert "| [mended](#mended) \\* † | correct |" in entries_to_page([config_to_entry(path)])
    write_expected(path, report_to_line(report_of_a_run(), 4.6))
    page = entries_to_page([config_to_entry(path)])
    assert "| [mended](#mended) | correct |" in page
    assert "an earlier graph (" not in page


def swapped(question: str) -> tuple[Any, ...]:
    """The same for two questions that differ in the order of their first two numbers alone."""
    numbers = re.findall(r"\d+", question)
    return re.sub(r"\d+", "#", question), sorted(numbers[:2]), numbers[2:]


def of_things(start: str, events: list[str]) -> tuple[Any, ...]:
    """The same for two boxes that differ in the objects alone."""
    return start, [event.split(" ", 1)[1] for event in events]


@pytest.mark.parametrize(
    ("names", "key", "near", "told"),
    [
        (
            ("supervisor", "supervisor-partly-shared", "dr-mas", "comam"),
            lambda task: swapped(task["question"]),
            (17, 57),
            "In supervisor, supervisor-partly-shared, dr-mas and comam 17 of the 57 that are held out",
        ),
        (("defer",), lambda task: swapped(task["question"]), (22, 33), "in defer 22 of the 33 sums that are"),
        (
            ("compact",),
            lambda task: of_things(task["start"], task["events"]),
            (14, 54),
            "In compact 14 of 54 differ from a training task in the objects alone.",
        ),
    ],
)
def test_the_page_counts_the_held_out_tasks_that_are_near_training_tasks(
    names: tuple[str, ...], key: Callable[[Any], tuple[Any, ...]], near: tuple[int, int], told: str
) -> None:
    for name in names:
        app = load_app(toml_to_config(ZOO / f"{name}.toml"))
        held_out = [task for task in app.heldout_tasks if task.get("known", True)]  # of defer, the sums
        trained = [key(task) for task in app.train_tasks]
        assert (sum(key(task) in trained for task in held_out), len(held_out)) == near
    assert told in " ".join(INTRO.split())


def test_the_page_names_the_estimator_and_the_order_of_updates_of_a_configuration() -> None:
    assert config_to_entry(ZOO / "dr-mas.toml").learns.startswith("dr_mas per action; offline awr")
    assert config_to_entry(ZOO / "meta_thinker.toml").learns.startswith("gae per action; alternating updates")


def report_of_a_run() -> Report:
    contrast = Contrast(
        variant="trained",
        metric="correct",
        n=96,
        clusters=48,
        mean_a=0.125,
        mean_b=0.5,
        diff=0.375,
        ci95=(0.25, 0.5),
        p_value=0.001,
        test="paired sign flips",
        p_adjusted=0.001,
        simultaneous=(0.25, 0.5),
    )
    points = [(0, "offline", None), (1, "online", 0.25), (2, "online", None), (3, "online", 0.5)]
    curve = [LearningPoint(round=n, phase=phase, episodes=8, reward_mean=mean) for n, phase, mean in points]
    return bare_report().model_copy(update={"contrasts": (contrast,), "learning_curve": tuple(curve)})


def test_the_line_of_a_run_is_that_of_its_report() -> None:
    report = report_of_a_run()
    assert report_to_line(report, 4.6) == (
        "correct 0.125 -> 0.500 on 48 held-out tasks (+0.375, 95 % +0.250 to +0.500); reward by round 0.25, -, 0.50; "
        f"seed {report.setup.seed}, 5 min"
    )


@pytest.mark.parametrize(
    ("low", "p_value", "words"),
    [
        (-0.02, 0.001, "correct not inferior by 0.1"),
        (-0.2, 0.4, "correct not shown to be not inferior by 0.1"),
        (0.01, 0.001, "correct better"),
    ],
)
def test_the_line_has_the_other_metric_and_the_margin_of_a_configuration_that_shows_them(
    low: float, p_value: float, words: str
) -> None:
    report = report_of_a_run()
    (decided,) = report.contrasts
    tested = NonInferiority(margin=0.1, value_range=1, p_value=p_value, p_adjusted=p_value, test="score", tasks_more=0)
    tokens = {"mean_a": 28.125, "mean_b": 8.375, "diff": -19.75, "ci95": (-22.0, -18.0625)}
    changes = {"simultaneous": (low, 0.5), "non_inferiority": tested}
    report = report.model_copy(
        update={
            "contrasts": (decided.model_copy(update=changes),),
            "secondary": (decided.model_copy(update={"metric": "reasoner_tokens", **tokens}),),
        }
    )
    shown = "reasoner_tokens 28.1 -> 8.4 a run (-19.8, 95 % -22.0 to -18.1)"
    line = report_to_line(report, 4.6, shown=SHOWN["compression"])
    assert f"; reward by round 0.25, -, 0.50; {shown}, {words}; seed " in line
    assert f"; reward by round 0.25, -, 0.50; {words}; seed " in report_to_line(report, 4.6)


def test_the_line_of_a_game_has_its_tournament_and_the_table_shows_it(tmp_path: Path) -> None:
    rated: dict[str, Any] = {"low": 10.4, "high": 95.6, "won": 30, "drawn": 10, "lost": 20}
    tournament = Tournament(
        sides=("left", "right"),
        ratings=(
            Rated(variant="before", elo=0, **{**rated, "low": 0, "high": 0}),
            Rated(variant="trained", elo=52.6, **rated),
            Rated(variant="version 4", elo=20, **rated),
        ),
        finite=True,
        matches=(
            Match(first="trained", second="before", won=20, drawn=0, lost=10, payoff_first=0.5, payoff_second=-0.5),
            Match(first="before", second="trained", won=15, drawn=0, lost=15, payoff_first=0.25, payoff_second=0.125),
            Match(first="trained", second="version 4", won=1, drawn=0, lost=9, payoff_first=-9, payoff_second=9),
        ),
        left_out=0,
    )
    elo = "Elo +53 (95 % +10 to +96) against the base at 0, by 2 opponents"
    more = f"{elo}; payoff against the base +0.312, the base's -0.125"
    assert tournament_to_parts(tournament, "before", "trained") == more.split("; ")
    ratings = (tournament.ratings[0], tournament.ratings[1].model_copy(update={"low": None, "high": None}))
    assert tournament_to_parts(tournament.model_copy(update={"ratings": ratings}), "before", "trained")[0] == (
        "Elo +53 against the base at 0, by 1 opponent"
    )
    report = report_of_a_run().model_copy(update={"tournament": tournament})
    after = Exploitability(240, low=0.125, high=0.25, unmet=("one", "two"))
    habits = Habits((0.25, None, 0.5), legal=0.625), Habits((0.0, 0.5, 1.0), legal=1.0)
    told = Compared(Exploitability(240, low=0.5, high=0.5), after, (0.25, 0.625), habits)
    line = report_to_line(report, 4.6, exploitability=told)
    chips = "0.500 -> 0.125 to 0.250 (2 of 12 decisions never met)"
    left = "0.25 to 0.62 of it left (95 % over the deals)"
    own = "yes with the lowest/middle/highest card 0.25/-/0.50 -> 0.00/0.50/1.00, legal replies 0.62 -> 1.00"
    chips = f"exploitability {chips} chips a game, by 240 games each, {left}, 0.333 without a look at the card"
    more = f"{chips}; {own}; {more}"
    assert f"; reward by round 0.25, -, 0.50; {more}; seed " in line
    path = tmp_path / "game.toml"
    text = (ZOO / "defer.toml").read_text(encoding="utf-8")
    path.write_text(re.sub(r"(?m)^# Expected: .*", f"# Expected: {line}", text), encoding="utf-8")
    page = entries_to_page([config_to_entry(path)])
    assert "| [game](#game) | correct | 0.125 | 0.500 | ▲ +0.375 | +0.250 to +0.500 | 48 | 5 |" in page
    assert f"\n- [game](#game): {more}.\n" in page


def test_twins_are_told_apart_by_the_tasks_that_both_ran(tmp_path: Path) -> None:
    """Four shared tasks, of which three gained a half and one nothing; a task of one of them counts for neither."""
    twin_scores = {**{(f"task {i}", k): 0.25 for i in range(4) for k in range(2)}, ("other", 0): 1.0}
    scores = {key: 0.75 if key[0] != "task 3" else 0.25 for key in twin_scores if key[0] != "other"}
    line = scores_to_line(scores, twin_scores, metric="correct", twin="defer-plain")
    assert line.startswith("correct 0.625 where defer-plain ends at 0.250, on 4 held-out tasks (+0.375, 95 % ")
    with pytest.raises(ValueError, match="share 1 tasks"):
        scores_to_line({("task 1", 0): 1.0}, twin_scores, metric="correct", twin="defer-plain")
    path = tmp_path / "defer.toml"
    path.write_text((ZOO / "defer.toml").read_text(encoding="utf-8"), encoding="utf-8")
    for told in ("an earlier line", line):
        write_line(path, told)
    page = entries_to_page([config_to_entry(path)])
    assert f"\n- [defer](#defer) against its twin: {line}.\n" in page
    assert f"\n- against its twin: {line}\n" in page
    assert "an earlier line" not in path.read_text(encoding="utf-8")


def test_a_new_run_of_one_of_two_twins_takes_out_what_an_earlier_one_was_to_the_other(tmp_path: Path) -> None:
    for name in ("social_dilemma", "social_dilemma-plain", "coach_player"):
        (tmp_path / f"{name}.toml").write_text((ZOO / f"{name}.toml").read_text(encoding="utf-8"), encoding="utf-8")
    write_expected(tmp_path / "social_dilemma-plain.toml", "cooperation 0.5 -> 0.6 on 8 held-out tasks")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert "# Expected: cooperation 0.5 -> 0.6 on 8 held-out tasks\n" in texts["social_dilemma-plain"]
    assert "# Against:" not in texts["social_dilemma"]
    assert "# Against:" in texts["coach_player"]  # which is no twin of either


@pytest.mark.parametrize("name", sorted(TWINS))
def test_twins_are_judged_on_the_same_tasks_by_the_same_metric(name: str) -> None:
    one, other = (toml_to_config(ZOO / f"{each}.toml") for each in (name, TWINS[name]))
    assert one.compare == other.compare
    assert (one.graph.tasks, one.graph.heldout, one.seed) == (other.graph.tasks, other.graph.heldout, other.seed)
    assert one.sampling == other.sampling


def test_a_run_that_begins_from_another_finds_it_where_the_runs_are(tmp_path: Path) -> None:
    config = tmp_path / "second.toml"
    config.write_text('[train]\nstart_from = "runs/zoo/first"   # stage one\nrounds = 4\n')
    moved = config_to_moved(config, tmp_path / 'a "place"/first', tmp_path / "runs/second.toml")
    assert tomllib.loads(moved.read_text()) == {"train": {"start_from": str(tmp_path / 'a "place"/first'), "rounds": 4}}


@pytest.mark.parametrize("name", sorted(OPPONENTS))
def test_a_tournament_of_the_zoo_is_between_two_sides_and_the_server_has_room_for_it(name: str) -> None:
    config = toml_to_config(ZOO / f"{name}.toml")
    opponents = [opponent for opponent in OPPONENTS[name].split(",") if opponent != "base"]
    assert len(opponents) != 1 or config.compare.variants, "it may be the trained version itself"
    if config.compare.variants:
        assert config.compare.variants[-1].adapters == "newest"
        assert not config.train.stop_early
        assert all(int(version) < config.train.rounds for version in opponents)
    players = 2 + len(opponents)
    assert len(config.train.trainer.sides) == 2
    assert config.serve.max_loras >= players * len(config.graph.nodes)
    assert config.compare.mixed_teams == "off"


def test_stages_of_the_zoo_have_the_rounds_of_joint_training_together() -> None:
    first, second, joint = (toml_to_config(ZOO / f"prisma-{name}.toml") for name in ("modules", "two-stage", "joint"))
    assert second.train.start_from == "runs/zoo/prisma-modules"
    assert first.train.rounds + second.train.rounds == joint.train.rounds
    for option in ("episodes_per_round", "samples_per_task"):
        assert getattr(first.train, option) == getattr(second.train, option) == getattr(joint.train, option)
    assert (first.graph.heldout, first.seed) == (second.graph.heldout, second.seed)  # the same tasks are held out
    assert (second.graph, second.compare) == (joint.graph, joint.compare)


def test_a_name_that_is_not_in_the_zoo_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["swam"])
    assert "swam: not in the zoo; there are " in capsys.readouterr().err


@pytest.mark.slow
def test_training_pulls_a_node_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(DUO, sometimes_right, tmp_path)
    assert [row["round"] for row in trained.rounds] == [0, 1, 2]
    assert (len(trained.collected), len(trained.trained)) == (8, 16)
    assert min(trained.norms.values()) > 0
    assert trained.pull("actor") > 0.2


@pytest.mark.slow
def test_without_learning_nothing_moves(tmp_path: Path) -> None:
    trained = train_zoo(DUO, sometimes_right, tmp_path, changes={"train.trainer.optimizer.lr": 1e-12})
    assert max(trained.norms.values()) < 1e-8
