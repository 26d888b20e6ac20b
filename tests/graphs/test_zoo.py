"""Owns: what all graphs of the zoo have in common, and the rig that their own tests train them with.

- Every file of examples/zoo/ is a configuration as it stands, says what figures to expect, and keeps whole tasks apart.
- docs/zoo.md is what the first lines of these files say; the line of a run is read from its report.
- The rig trains: where reward depends on what a node says, its adapter is pulled towards what paid; without a
  learning rate worth its name nothing moves.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pages.zoo_page import NOT_TRAINED, PAGE, config_to_entry, entries_to_page, written
from support.sample_report import bare_report
from support.zoo_answers import DUO, sometimes_right
from support.zoo_rig import ZOO, train_zoo

from examples.zoo.run import main, report_to_line
from marft_bridge.comparison.records import Contrast
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rollouts.app import load_app
from marft_bridge.runs.learning_curve import LearningPoint

FILES = sorted(ZOO.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_of_the_zoo_loads_with_enough_different_tasks(path: Path) -> None:
    config = toml_to_config(path)
    app = load_app(config)
    ids = [str(task["id"]) for task in (*app.train_tasks, *app.heldout_tasks)]
    assert len(set(ids)) == len(ids) >= 100
    assert len(app.heldout_tasks) >= 20
    assert re.search(r"^# Expected: \S", path.read_text(), re.MULTILINE)


def test_the_page_says_what_the_configurations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == written()


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


def test_the_page_names_the_estimator_and_the_order_of_updates_of_a_configuration() -> None:
    assert config_to_entry(ZOO / "dr-mas.toml").learns.startswith("dr_mas per action; offline awr")
    assert config_to_entry(ZOO / "meta_thinker.toml").learns.startswith("gae per action; alternating updates")


def test_the_line_of_a_run_is_that_of_its_report() -> None:
    contrast = Contrast(
        variant="after",
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
    report = bare_report().model_copy(update={"contrasts": (contrast,), "learning_curve": tuple(curve)})
    assert report_to_line(report, 4.6) == (
        "correct 0.125 -> 0.500 on 48 held-out tasks (+0.375, 95 % +0.250 to +0.500); reward by round 0.25, -, 0.50; "
        f"seed {report.setup.seed}, 5 min"
    )


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
