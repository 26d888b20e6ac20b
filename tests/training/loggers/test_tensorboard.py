"""Owns: the figures of an update can be looked at in TensorBoard, as they are in `metrics.jsonl`.

- Nested names are tags; what was not measured has no point, which is not a point at 0.
- A step that is written again after a resume is there once, and what came after it is gone.
- Files are their owner's only.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.io_wrapper import IsTensorFlowEventsFile

from marft_bridge.training.loggers.run_loggers import line_to_scalars
from marft_bridge.training.loggers.tensorboard import write_scalars

LINE: dict[str, Any] = {
    "phase": "online",
    "agents": {
        "team/reasoner": {"approx_kl": 0.25, "clipfrac": None, "stopped_early": True, "tokens": 12},
        "actor": {"approx_kl": 0.5, "gradient_share": {"reward": 0.75, "baseline": 0.25}},
    },
    "order": ["actor", "team/reasoner"],
    "critic": {"explained_variance": -0.5, "value_loss": 0.0},
    "drops": {},
}
SCALARS = {
    "agents/team/reasoner/approx_kl": 0.25,
    "agents/team/reasoner/stopped_early": 1.0,
    "agents/team/reasoner/tokens": 12.0,
    "agents/actor/approx_kl": 0.5,
    "agents/actor/gradient_share/reward": 0.75,
    "agents/actor/gradient_share/baseline": 0.25,
    "critic/explained_variance": -0.5,
    "critic/value_loss": 0.0,
}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard's own reader finds them."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of what a resume takes back
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_nested_figures_are_tags_and_what_is_no_number_is_left_out() -> None:
    assert line_to_scalars(LINE) == SCALARS


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    write_scalars(tmp_path / "t", SCALARS, 3)
    assert read(tmp_path / "t") == {tag: [(3, value)] for tag, value in SCALARS.items()}


def test_steps_follow_one_another_in_one_curve(tmp_path: Path) -> None:
    for step in range(12):
        write_scalars(tmp_path, {"loss": step / 4}, step)
    assert read(tmp_path) == {"loss": [(step, step / 4) for step in range(12)]}


def test_a_step_that_is_written_again_takes_back_itself_and_all_later_ones(tmp_path: Path) -> None:
    for step in range(5):
        write_scalars(tmp_path, {"loss": float(step), "old": 1.0}, step)
    write_scalars(tmp_path, {"loss": 0.5}, 3)
    assert read(tmp_path) == {
        "loss": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 0.5)],
        "old": [(0, 1.0), (1, 1.0), (2, 1.0)],
    }


def test_a_line_without_a_number_is_an_empty_step(tmp_path: Path) -> None:
    write_scalars(tmp_path, line_to_scalars({"phase": "offline", "critic": {"value_loss": None}}), 0)
    assert read(tmp_path) == {}


def test_files_are_for_their_owner_and_tensorboard_takes_them_for_its_own(tmp_path: Path) -> None:
    write_scalars(tmp_path / "t", SCALARS, 0)
    (file,) = (tmp_path / "t").iterdir()
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
    assert IsTensorFlowEventsFile(str(file))
