"""A configuration -> some rounds of the real `collect` and `train` on the real model server -> the parts of each round.

The commands are those of any user, in processes of their own beside one server that `marft-bridge serve` keeps up, as
in `make demo`. All figures are those that the run itself wrote into `metrics.jsonl`. Invariant: the parts of a round,
with what is left as `other`, sum to the round.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from benchmarks.harness import MEASUREMENTS, Measurement
from examples.study.run import dict_to_toml
from marft_bridge.config.bridge import BridgeConfig, set_dotted
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from trace_store.store import TraceStore

Parts = dict[str, float]
"""Seconds by name: publish, rollout, score, update, other."""

_EACH = 'set -e; for c in collect train; do "$0" -m marft_bridge "$c" --config "$1"; done'
_TOKENS = """
SELECT {of}(len(prompt_ids) + len(sampled_ids)) FROM actions JOIN episodes USING (episode_id) WHERE run_id = 'train'
"""


def content_to_measurements(
    content: Mapping[str, Any],
    folder: Path,
    *,
    rounds: int,
    warm: int = 0,
    per: int,
    unit: str,
    length: int | None = None,
) -> Iterator[Measurement]:
    """One run: its rounds are dealt out to MEASUREMENTS measurements, or are one where there is one round.

    Args:
        content: a bridge.toml.
        folder: an empty one.
        rounds: that are counted.
        warm: rounds before them, which are not counted.
        per: what a round's seconds are divided by.
        length: tokens that a call must have on average, within a tenth.
    """
    timed = content_to_rounds(content, folder, warm + rounds)[warm:]
    if length is not None:
        found = mean_length(folder)
        assert abs(found - length) <= 0.1 * length, f"calls have {found:.0f} tokens, not {length}"
    for first in range(min(MEASUREMENTS, rounds)):
        yield rounds_to_measurement(timed[first::MEASUREMENTS], per, unit)


def content_to_rounds(content: Mapping[str, Any], folder: Path, rounds: int) -> list[Parts]:
    """Collects and trains in `folder`; the parts of every round."""
    path = folder / "bridge.toml"
    path.write_text(dict_to_toml(changed(content, {"run": str(folder.resolve() / "run"), "train.rounds": rounds})))
    argv = [sys.executable, "-m", "marft_bridge", "serve", "--config", str(path), "--"]
    done = subprocess.run(
        [*argv, "sh", "-c", _EACH, sys.executable, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [line_to_parts(line) for line in read_metrics(RunFolder(folder / "run").metrics) if line["round"] > 0]


def changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A bridge.toml with further options, as {"train.trainer.optimizer.lr": 1e-2}; checked."""
    new = deepcopy(dict(content))  # the given content stays as it is
    for key, value in changes.items():
        set_dotted(new, key, value)
    BridgeConfig.model_validate(new)
    return new


def line_to_parts(line: Mapping[str, Any]) -> Parts:
    """A line of metrics.jsonl -> where its round's time went."""
    parts = dict(line["seconds"])
    assert None not in parts.values(), f"round {line['round']} lacks a part: {parts}"
    whole = parts.pop("round")
    return parts | {"other": whole - sum(parts.values())}


def rounds_to_measurement(rounds: Sequence[Parts], per: int, unit: str) -> Measurement:
    """The round of median length, with its own parts, so that they sum to it; the baseline is its rollout."""
    middle = sorted(rounds, key=lambda parts: sum(parts.values()))[(len(rounds) - 1) // 2]
    parts = {name: seconds / per for name, seconds in middle.items()}
    whole = sum(parts.values())
    return Measurement(whole, unit, parts["rollout"], whole / parts["rollout"], parts)


def mean_length(folder: Path) -> float:
    """Prompt and sampled tokens of a call in training, on average."""
    return float(_tokens(folder, "avg"))


def recorded_tokens(folder: Path) -> int:
    """Prompt and sampled tokens of all calls in training."""
    return int(_tokens(folder, "sum"))


def _tokens(folder: Path, of: str) -> Any:
    with TraceStore.open(RunFolder(folder / "run").store, read_only=True) as store:
        return store.sql(_TOKENS.format(of=of))[0][0]
