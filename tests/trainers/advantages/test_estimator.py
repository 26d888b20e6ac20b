"""Owns: the one interface of estimators, and how an option finds its class.

- An estimator of the user's, in a file of under 40 lines, is named in bridge.toml and trains; nothing else knows it.
- A file that is put into trainers/advantages/ is an estimator by its class's name, in no list.
- What an estimator declares is what the options refuse or fill in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.school_rig import School, school_in
from support.trainer_options import trainer_options

import trainers.advantages
from marft_bridge.config.bridge import toml_to_config
from trainers.advantages.estimator import Estimator, estimators, name_to_estimator

TOY = '''"""Returns less the median of the round."""

import numpy as np

from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline


class LessTheMedian(BaselineEstimator):
    """Every return against the median of all returns of the round, whoever acted."""

    name = "less_the_median"
    per_agent = False

    def baseline(self, returns_A, data):
        return Baseline(np.full_like(returns_A, np.median(returns_A)), np.ones_like(returns_A))
'''

BRIDGE = """
[graph]
app = "graphs.math_duo:build"
nodes = ["actor"]
tasks = "graphs.math_duo:tasks"
reward = "graphs.math_duo:reward"

[train.trainer.advantage]
estimator = "NAMED"
"""


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as made:
        yield made


def test_an_estimator_in_a_file_of_the_users_trains_from_bridge_toml(school: School, tmp_path: Path) -> None:
    assert len(TOY.splitlines()) < 40
    (tmp_path / "mine.py").write_text(TOY)
    named = f"{tmp_path / 'mine.py'}:LessTheMedian"
    (tmp_path / "bridge.toml").write_text(BRIDGE.replace("NAMED", named))
    advantage = toml_to_config(tmp_path / "bridge.toml").train.trainer.advantage
    assert advantage.estimator_class.name == "less_the_median"

    school.server.answer = lambda body: "yes" if int(body["messages"][0]["content"].split()[0]) % 3 else "no"
    school.collect()
    school.train(trainer={"advantage": advantage.model_dump(exclude_unset=True)})
    lines = [json.loads(line) for line in (school.run / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["phase"] == "online"]
    assert line["critic"]["value_loss"] is None  # it asks no critic
    assert all(agent["adapter_moved"] > 0 for agent in line["agents"].values())
    assert all(agent["advantage_std"] > 0 for agent in line["agents"].values())


def test_a_file_of_the_folder_is_an_estimator_by_the_name_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = set(estimators())
    (tmp_path / "less_the_median.py").write_text(TOY)
    monkeypatch.setattr(trainers.advantages, "__path__", [*trainers.advantages.__path__, str(tmp_path)])
    estimators.cache_clear()
    try:
        assert list(estimators()) == sorted(ours | {"less_the_median"})
        assert trainer_options(estimator="less_the_median").advantage.normalization == "none"
    finally:
        estimators.cache_clear()
        sys.modules.pop("trainers.advantages.less_the_median", None)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("grpoo", f"'grpoo' is no estimator; there are {', '.join(estimators())}, or module:Class"),
        ("nowhere.py:Mine", "there is no file 'nowhere.py'"),
        ("trainers.config:TrainerOptions", "is not a class that extends trainers.advantages.estimator.Estimator"),
        ("trainers.config:Nothing", "'trainers.config' has no 'Nothing'"),
    ],
)
def test_a_name_that_is_no_estimators_is_refused_in_one_line(name: str, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        trainer_options(estimator=name)
    assert line in str(caught.value)


def test_every_estimator_of_the_folder_declares_what_it_needs() -> None:
    declared = {
        name: (each.needs_critic, each.needs_groups, each.per_agent, each.keeps_state, each.normalization)
        for name, each in estimators().items()
    }
    published = {
        "gae": (True, False, True, False, "agent"),
        "grpo": (False, True, False, False, "none"),
        "rloo": (False, True, False, False, "none"),
        "dr_mas": (False, True, True, False, "none"),
        "at_grpo": (False, True, True, False, "none"),
        "rae": (False, False, True, True, "agent"),
        "c3": (False, True, True, False, "none"),
        "tree_grpo": (False, True, True, False, "none"),
        "advantage_alignment": (False, True, True, False, "none"),
        "mars2": (False, False, False, False, "none"),
        "hrpo": (False, True, True, False, "none"),
    }
    assert {name: declared[name] for name in published} == published
    assert [name for name, each in estimators().items() if each.needs_forks] == ["c3"]
    assert {name for name, each in estimators().items() if each.compares_siblings} == {"at_grpo", "c3"}
    assert [name for name, each in estimators().items() if each.needs_sides] == ["advantage_alignment"]
    assert [name for name, each in estimators().items() if each.pays_calls_alone] == ["mars2"]
    assert all(name_to_estimator(name) is each for name, each in estimators().items())
    assert all(issubclass(each, Estimator) and each.__doc__ for each in estimators().values())
