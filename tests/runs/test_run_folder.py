"""Owns: files of a run folder that were damaged are named in one line, or left out as far as they are torn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.paths import ROOT

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.runs.run_folder import RunFolder, read_metrics


@pytest.fixture
def config(folder: RunFolder) -> BridgeConfig:
    return toml_to_config(ROOT / "examples/math_duo/bridge.toml", {"run": str(folder.path)})


@pytest.mark.parametrize("content", [b'{"collect": ', b"", b"[]", b"null", b'{"collect": "\xc3'])
def test_damaged_notes_are_named_and_not_overwritten(folder: RunFolder, config: BridgeConfig, content: bytes) -> None:
    folder.notes.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^train: cannot read .*bridge\.json: .*; put it back from a copy") as caught:
        folder.record_config("train", config)
    assert "\n" not in str(caught.value)
    assert folder.notes.read_bytes() == content


def test_notes_keep_what_each_command_was_given_the_newest_last(folder: RunFolder, config: BridgeConfig) -> None:
    for command in ("collect", "train", "collect"):
        folder.record_config(command, config)
    assert list(json.loads(folder.notes.read_text())) == ["train", "collect"]


def test_a_torn_last_line_of_the_metrics_is_left_out_wherever_it_was_torn(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = b'{"round": 1, "node": "planner"}\n'
    last = '{"round": 2, "node": "plan\u00e9r"}'.encode()
    for length in range(len(last)):
        file.write_bytes(whole + last[:length])
        assert [line["round"] for line in read_metrics(file)] == [1]
    file.write_bytes(whole + last + b"\n")
    assert [line["round"] for line in read_metrics(file)] == [1, 2]
    assert read_metrics(tmp_path / "none") == []
