"""Owns: what `train.loggers` promises of every logger.

- A name or a table is taken; another one, two of one name, and a package that is missing are refused in one line.
- Each step is told once, after its checkpoint; a resumed training goes on in the same run, and a logger that is new
  or failed gets what it lacks; a training that begins again has a new run.
- A logger that cannot be opened, or fails on the way, costs one line and itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import BridgeConfig, TrainOptions, toml_to_config
from marft_bridge.config.loggers import MlflowOptions, TrackioOptions, WandbOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training.loggers import run_loggers
from marft_bridge.training.loggers.interface import LoggedRun
from marft_bridge.training.loggers.run_loggers import open_loggers, require_loggers

DUO = ROOT / "examples/math_duo/bridge.toml"


def config_with(*loggers: Any) -> BridgeConfig:
    return toml_to_config(DUO, {"train.loggers": list(loggers)})


def lines(*steps: int) -> list[dict[str, Any]]:
    return [{"round": step, "critic": {"value_loss": step / 4, "epochs": None}} for step in steps]


def points(folder: Path) -> list[tuple[int, float]]:
    """(step, value) of the loss, as TensorBoard's own reader finds them."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars("critic/value_loss")]


# -- the configuration ------------------------------------------------------------------------------------------------


def test_a_name_is_a_table_without_options_and_nothing_is_logged_or_sent_unless_it_is_written() -> None:
    assert TrainOptions().loggers == ()
    mixed = config_with("wandb", {"name": "mlflow", "tracking_uri": "http://127.0.0.1:1"}, "trackio").train.loggers
    assert mixed == (WandbOptions(), MlflowOptions(tracking_uri="http://127.0.0.1:1"), TrackioOptions())
    assert WandbOptions().mode == "offline"
    assert MlflowOptions().tracking_uri is None
    assert TrackioOptions().space is None
    written = TrainOptions(loggers=mixed).model_dump(mode="json")["loggers"]
    assert TrainOptions.model_validate({"loggers": written}).loggers == mixed  # as bridge.json has them


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (["neptune"], "train.loggers.0: a name, or a table whose name is one of tensorboard, wandb, mlflow, trackio"),
        ([{"mode": "online"}], "a name, or a table whose name is one of"),
        (["wandb", {"name": "wandb", "mode": "online"}], "loggers: 'wandb' is there twice; leave one out"),
        ([{"name": "wandb", "projct": "x"}], "unknown key .*projct'; did you mean 'project'?"),
        ([{"name": "wandb", "mode": "on"}], "mode: Input should be 'offline' or 'online'"),
    ],
)
def test_what_is_no_logger_is_refused_in_one_line(loggers: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        config_with(*loggers)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    ["https://bot:S3cretPw@mlflow.corp:5000", "https://S3cretPw@mlflow.corp", "postgresql://a:S3cretPw@db/mlflow"],
)
def test_an_address_of_a_tracking_server_holds_no_user_and_the_refusal_does_not_repeat_it(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking_uri: .*MLFLOW_TRACKING_PASSWORD") as refused:
        config_with({"name": "mlflow", "tracking_uri": uri})
    assert "S3cretPw" not in str(refused.value)


def test_the_option_of_old_is_refused_with_what_is_written_now() -> None:
    with pytest.raises(ConfigError, match=r'tensorboard is one of the loggers now: loggers = \["tensorboard"\]'):
        toml_to_config(DUO, {"train.tensorboard": True})


@pytest.mark.parametrize(
    ("logger", "module"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
        ("trackio", "trackio"),
    ],
)
def test_a_package_that_is_missing_is_one_line_that_installs_it(
    logger: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_loggers, "is_installed", lambda name: name != module)
    with pytest.raises(ConfigError) as refused:
        require_loggers(config_with(logger).train.loggers)
    line = f"train.loggers: {logger} needs {module}: pip install 'marft-bridge[{logger}]', or leave it out"
    assert str(refused.value) == line


def test_a_tracking_server_needs_no_database_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loggers, "is_installed", lambda name: name == "mlflow")
    require_loggers(config_with({"name": "mlflow", "tracking_uri": "http://127.0.0.1:1"}).train.loggers)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_every_step_is_told_once_also_over_resumes(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path / "run"), config_with("tensorboard")
    for is_resumed, rounds in ((False, [(0,), (0, 1)]), (True, [(0, 1), (0, 1, 2)]), (True, [(0, 1, 2), (0, 1, 2, 3)])):
        with open_loggers(config, folder, is_resumed, say=pytest.fail) as loggers:
            for steps in rounds:
                loggers.log(lines(*steps))
    assert points(folder.tensorboard) == [(step, step / 4) for step in range(4)]
    assert len(list(folder.tensorboard.iterdir())) == 4
    assert (folder.loggers / "state.json").stat().st_mode & 0o777 == 0o600


def test_a_logger_that_comes_later_gets_all_that_came_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with open_loggers(config_with(), folder, False, say=pytest.fail) as loggers:
        loggers.log(lines(0, 1, 2))
    assert not folder.loggers.exists()
    with open_loggers(config_with("tensorboard"), folder, True, say=pytest.fail) as loggers:
        loggers.log(lines(0, 1, 2))
    assert points(folder.tensorboard) == [(0, 0.0), (1, 0.25), (2, 0.5)]


def run_ids(folder: RunFolder) -> dict[str, str]:
    return {name: entry["run"] for name, entry in json.loads((folder.loggers / "state.json").read_text()).items()}


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_resumed_training_has_the_run_of_before_and_one_that_begins_again_a_new_one(
    tmp_path: Path, is_resumed: bool
) -> None:
    folder, config = RunFolder(tmp_path / "run"), config_with("tensorboard")
    with open_loggers(config, folder, False, say=pytest.fail) as loggers:
        loggers.log(lines(0, 1))
    before = run_ids(folder)
    with open_loggers(config, folder, is_resumed, say=pytest.fail) as loggers:
        loggers.log(lines(0))
    assert (run_ids(folder) == before) == is_resumed
    assert points(folder.tensorboard) == ([(0, 0.0), (1, 0.25)] if is_resumed else [(0, 0.0)])


# -- failures ---------------------------------------------------------------------------------------------------------


class Broken:
    """A logger whose third step fails, and whose end does, too."""

    def __init__(self, steps: list[int]) -> None:
        self.steps, self.broken = steps, True

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if self.broken and step == 2:
            raise RuntimeError("the disk is full\nand more")
        self.steps.append(step)

    def close(self) -> None:
        if self.broken:
            raise OSError("closed badly")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """In place of wandb."""
    logger = Broken([])
    kind = run_loggers._KINDS["wandb"]._replace(open=lambda *_: logger)
    monkeypatch.setitem(run_loggers._KINDS, "wandb", kind)
    return logger


def test_a_logger_that_fails_costs_one_line_and_gets_the_rest_when_it_works_again(
    tmp_path: Path, broken: Broken
) -> None:
    folder, config, said = RunFolder(tmp_path / "run"), config_with("wandb", "tensorboard"), list[str]()
    with open_loggers(config, folder, False, say=said.append) as loggers:
        for end in range(1, 6):
            loggers.log(lines(*range(end)))
    assert said == [
        "logger wandb failed and is left out, training goes on (the disk is full); --resume logs what it lacks"
    ]
    assert broken.steps == [0, 1]
    assert [step for step, _ in points(folder.tensorboard)] == [0, 1, 2, 3, 4]  # the others are not touched
    broken.broken = False
    with open_loggers(config, folder, True, say=said.append) as loggers:
        loggers.log(lines(*range(5)))
    assert broken.steps == [0, 1, 2, 3, 4]
    assert len(said) == 1


def test_a_logger_that_cannot_be_opened_or_ended_is_said(
    tmp_path: Path, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(options: WandbOptions, run: LoggedRun) -> Any:
        raise ValueError

    folder, said = RunFolder(tmp_path / "run"), list[str]()
    with open_loggers(config_with("wandb"), folder, False, say=said.append) as loggers:
        loggers.log(lines(0))
    assert [line.partition("(")[2] for line in said] == ["closed badly); --resume logs what it lacks"]
    monkeypatch.setitem(run_loggers._KINDS, "wandb", run_loggers._KINDS["wandb"]._replace(open=refuse))
    with open_loggers(config_with("wandb"), folder, True, say=said.append) as loggers:
        loggers.log(lines(0, 1))
    assert said[1:] == [
        "logger wandb failed and is left out, training goes on (ValueError); --resume logs what it lacks"
    ]


def test_a_run_folder_that_cannot_be_written_costs_the_loggers_only(tmp_path: Path) -> None:
    folder, said = RunFolder(tmp_path / "run"), list[str]()
    folder.create()
    folder.loggers.write_text("not a folder")
    with open_loggers(config_with("tensorboard"), folder, False, say=said.append) as loggers:
        loggers.log(lines(0))
    assert len(said) == 1
    assert said[0].startswith("logger tensorboard failed and is left out")


def test_what_a_logger_is_told_of_the_configuration_has_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[LoggedRun] = []
    monkeypatch.setitem(
        run_loggers._KINDS,
        "wandb",
        run_loggers._KINDS["wandb"]._replace(open=lambda _, run: told.append(run) or Broken([])),
    )
    config = toml_to_config(DUO, {"train.loggers": ["wandb"], "train.traces": ["/private/archive"], "seed": 7})
    with open_loggers(config, RunFolder(tmp_path / "run"), False, say=lambda _: None):
        pass
    (run,) = told
    assert run.options["seed"] == 7
    assert run.options["train"]["trainer"]["lora"]["rank"] == 8
    assert "/" not in json.dumps(run.options)
