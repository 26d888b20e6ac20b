"""Owns: the adapters of a team -> the run folder of the app that it is compared with.

- The version that training names comes along under its number, with its weights; without a name the newest.
- A node of one name on both sides, and adapters of another base model, stay where they are, and it is said why.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare_rig import save_model

from marft_bridge.distillation.team_adapters import copy_team_adapters
from marft_bridge.runs.named_version import NamedVersion, write_named_version
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_checks import WEIGHTS_FILE
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trainers.common.files import weights_to_sha256


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def team(tmp_path: Path, model: Path) -> RunFolder:
    """A duo with versions 0 to 3."""
    folder = RunFolder(tmp_path / "team")
    registry = AdapterRegistry(folder.adapters, weights_to_sha256(model))
    folder.path.mkdir()
    for node in ("reasoner", "actor"):
        for version in range(4):
            write_zero_adapter(registry.new_folder(node, version), model, ("q_proj", "v_proj"))
            registry.register(node, version, None, metrics={})
    return folder


def own_registry(tmp_path: Path, model: Path) -> AdapterRegistry:
    (tmp_path / "one").mkdir(exist_ok=True)
    return AdapterRegistry(tmp_path / "one" / "adapters", weights_to_sha256(model))


NODES = {"reasoner", "actor", "router"}  # the last one has no adapter


def test_the_named_version_comes_along_or_else_the_newest(tmp_path: Path, model: Path, team: RunFolder) -> None:
    registry = own_registry(tmp_path, model)
    write_named_version(team, NamedVersion(version=2, newest=3, reward="reward"))
    for _ in range(2):  # a second time changes nothing
        assert copy_team_adapters(team, registry, team_nodes=NODES, own_nodes=["solver"]) == (
            {"actor": 2, "reasoner": 2},
            None,
        )
    assert registry.versions("actor") == [2]
    theirs = AdapterRegistry(team.adapters, weights_to_sha256(model))
    assert registry.hashes("actor", 2) == theirs.hashes("actor", 2)
    team.best.unlink()
    assert copy_team_adapters(team, registry, team_nodes=NODES, own_nodes=["solver"])[0] == {"actor": 3, "reasoner": 3}


def test_every_version_that_comes_along_has_the_weights_that_the_team_has_under_its_number(
    tmp_path: Path, model: Path, team: RunFolder
) -> None:
    registry = own_registry(tmp_path, model)
    teams = [team, RunFolder(tmp_path / "second")]
    theirs = [AdapterRegistry(folder.adapters, weights_to_sha256(model)) for folder in teams]
    teams[1].path.mkdir()
    for node in ("reasoner", "actor"):
        folder = theirs[1].new_folder(node, 3)
        write_zero_adapter(folder, model, ("q_proj",) if node == "reasoner" else ("q_proj", "v_proj"))
        theirs[1].register(node, 3, None, metrics={})
    answers = [copy_team_adapters(each, registry, team_nodes=NODES, own_nodes=["solver"]) for each in teams]
    for (copied, _), registered in zip(answers, theirs, strict=True):
        assert copied
        for node, version in copied.items():
            assert registry.hashes(node, version) == registered.hashes(node, version)
    assert answers[0] == ({"actor": 3, "reasoner": 3}, None)
    copied, reason = answers[1]
    assert copied == {"actor": 3}, "the same weights are there already"
    assert reason is not None
    assert f"adapter v3 of node 'reasoner' is in {registry.root} already" in reason
    assert "\n" not in reason


def test_weights_that_changed_since_the_team_registered_them_are_not_taken(
    tmp_path: Path, model: Path, team: RunFolder
) -> None:
    registry = own_registry(tmp_path, model)
    (team.adapters / "reasoner" / "3" / WEIGHTS_FILE).write_bytes(b"other")
    copied, reason = copy_team_adapters(team, registry, team_nodes=NODES, own_nodes=["solver"])
    assert copied == {"actor": 3}
    assert "is not what was registered" in (reason or "")
    assert registry.versions("reasoner") == []


def test_what_cannot_be_compared_stays_where_it_is_and_it_is_said_why(
    tmp_path: Path, model: Path, team: RunFolder
) -> None:
    registry = own_registry(tmp_path, model)
    copied, reason = copy_team_adapters(team, registry, team_nodes=NODES, own_nodes=["actor"])
    assert (copied, reason) == ({}, "'actor' is the name of a node of both")
    other = own_registry(tmp_path, save_model(tmp_path / "other", value=1.0))
    copied, reason = copy_team_adapters(team, other, team_nodes=NODES, own_nodes=["solver"])
    assert copied == {}
    assert reason is not None
    assert "was trained on another base model" in reason
    assert other.versions("actor") == []
    assert copy_team_adapters(RunFolder(tmp_path / "none"), registry, team_nodes=NODES, own_nodes=[]) == (
        {},
        f"{tmp_path / 'none'} has none",
    )
