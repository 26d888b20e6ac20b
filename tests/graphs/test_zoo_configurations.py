"""Owns: the zoo's configurations of one graph: who acts by which adapter, and how the team's reward is shared out.

- UnityMAS-O's maps: apart, all on one adapter, some on one adapter. What is shared is one set of weights.
- Dr. MAS: an agent that acts more often is normalised by itself. CoMAM: agents get more or less of the team's reward.
"""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.pages.zoo_page import config_to_name, configs
from support.zoo_answers import half_right
from support.zoo_rig import ZOO, Trained, train_zoo

from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rollouts.app import load_app
from marft_bridge.runs.run_folder import RunFolder


def duo(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A reasoner that says one of two things, and an actor that is right half the time."""
    if node == "reasoner":
        return chance.choice(["add", "take"])
    numbers = [int(number) for number in re.findall(r"\d+", messages[-1]["content"].split("\n")[0])]
    return str(sum(numbers[:2])) if chance.random() < 0.5 else "zzzz"


def shares_or_keeps(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Either player, by the toss of a coin."""
    return chance.choice(["yes", "no"])


def newest_weights(trained: Trained, node: str) -> str:
    """A digest of the tensors of a node's newest published adapter."""
    folders = (RunFolder(Path(trained.config.run or "")).adapters / node).iterdir()
    newest = max(folders, key=lambda folder: int(folder.name))
    tensors = load_file(newest / "adapter_model.safetensors")
    return hashlib.sha256(b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script", "alike"),
    [
        ("duo-separate", duo, [{"reasoner"}, {"actor"}]),
        ("duo-shared", duo, [{"reasoner", "actor"}]),
        ("supervisor-partly-shared", half_right, [{"supervisor"}, {"adder", "multiplier"}]),
        ("social_dilemma-shared", shares_or_keeps, [{"left", "right"}]),
    ],
)
def test_agents_of_one_adapter_are_published_with_one_set_of_weights(
    name: str, script: Any, alike: list[set[str]], tmp_path: Path
) -> None:
    trained = train_zoo(ZOO / f"{name}.toml", script, tmp_path, rounds=2, episodes=8)
    found: dict[str, set[str]] = {}
    for node in trained.config.graph.nodes:
        found.setdefault(newest_weights(trained, node), set()).add(node)
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, alike))
    agents = trained.rounds[-1]["agents"]
    assert len({agents[node]["adapter"] for node in trained.config.graph.nodes}) == len(alike)
    assert all(norm > 0 for norm in trained.norms.values())


@pytest.mark.slow
def test_dr_mas_compares_an_agent_with_itself_however_often_it_acts(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "dr-mas.toml", half_right, tmp_path, rounds=2, episodes=8)
    agents = trained.rounds[-1]["agents"]
    assert agents["supervisor"]["actions"] > agents["adder"]["actions"] + agents["multiplier"]["actions"]
    assert trained.norms["supervisor"] > 0
    # Every group of samples is centred by its own mean, so an agent's advantages have mean 0, however many it has.
    assert agents["supervisor"]["advantage_mean"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_comam_gives_agents_different_shares_of_the_teams_reward(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "comam.toml", half_right, tmp_path, rounds=2, episodes=8)
    for row in trained.rounds[1:]:
        weights = row["critic"]["contribution"]
        assert set(weights) <= {"supervisor", "adder", "multiplier"}
        assert sum(weights.values()) / len(weights) == pytest.approx(1)
        assert all(weight >= 0 for weight in weights.values())
    # The supervisor's own reward is what the team's begins with, so it says of the samples what the team's says.
    assert all(row["critic"]["contribution"]["supervisor"] > 0 for row in trained.rounds[1:])
    assert trained.norms["supervisor"] > 0


def test_what_is_compared_is_as_the_configurations_say() -> None:
    dr_mas, comam = (toml_to_config(ZOO / f"{name}.toml").train for name in ("dr-mas", "comam"))
    advantage = dr_mas.trainer.advantage
    assert (advantage.estimator, advantage.contribution, dr_mas.samples_per_task) == ("dr_mas", "equal", 4)
    assert (comam.trainer.advantage.contribution, comam.samples_per_task) == ("rank_consistency", 4)


@pytest.mark.parametrize("path", configs(), ids=config_to_name)
def test_every_configuration_can_be_run_to_the_end_of_its_comparison(path: Path) -> None:
    """Training takes minutes, and what its comparison asks for is known before."""
    app = load_app(toml_to_config(path))
    assert min(len(app.train_tasks), len(app.heldout_tasks)) > 30
