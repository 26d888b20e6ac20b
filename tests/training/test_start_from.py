"""Owns: a run that begins from another run's adapters: which, that they are what it goes on from, and what is refused.

- A node begins from the version that the other training names, else its newest; one that it did not train, from its
  base model.
- Another base model, another shape of adapter, and held-out tasks that the other run learned from are refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.school_rig import TASKS, School, save_school_model, school_in
from support.tiny_policy import AGENTS, make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options

from marft_bridge.common.errors import ConfigError
from marft_bridge.rollouts.held_out import record_learned_tasks, take_over_learned_tasks
from marft_bridge.runs.named_version import NamedVersion, choose_version, write_named_version
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from marft_bridge.training.start_adapters import config_to_start
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256
from trainers.marft import MarftTrainer

SCHOOL_LORA: dict[str, Any] = {"lora": {"rank": 1, "alpha": 1.0}}  # as `write_zero_adapter` makes them
OFF: dict[str, Any] = {"trainer": {"offline": {"mode": "off"}}}


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


def other_run(folder: Path, model: Path, versions: dict[str, list[int]]) -> Path:
    """The folder of a run with these versions of each node."""
    folder.mkdir()
    TraceStore.open(folder / "store.duckdb").close()
    registry = AdapterRegistry(folder / "adapters", weights_to_sha256(model))
    for node, numbers in versions.items():
        for version in numbers:
            write_zero_adapter(registry.new_folder(node, version), model, ("q_proj", "v_proj"))
            registry.register(node, version, None, metrics={})
    return folder


def begun(school: School, other: Path, **trainer: Any) -> dict[str, int]:
    config = school.config(start_from=str(other), trainer={**SCHOOL_LORA, **trainer})
    registry = AdapterRegistry(school.run / "adapters", weights_to_sha256(school.model))
    return {node: row.version for node, row in config_to_start(config, registry).items()}


def test_the_named_version_counts_where_a_node_has_it_and_else_its_newest() -> None:
    named = NamedVersion(version=2, newest=4, reward="reward")
    assert choose_version(named, [1, 2, 3, 4]) == 2
    assert choose_version(named, [1, 3]) == 3
    assert choose_version(None, [1, 3]) == 3
    assert choose_version(named, []) is None


def test_nodes_begin_from_what_the_other_run_made_of_them_and_the_others_from_their_base(school: School) -> None:
    other = other_run(school.folder / "other", school.model, {"reasoner": [0, 1, 2, 3], "actor": [0]})
    assert begun(school, other) == {"reasoner": 3}  # version 0 changes nothing, and is no start
    write_named_version(RunFolder(other), NamedVersion(version=2, newest=3, reward="reward"))
    assert begun(school, other) == {"reasoner": 2}


def test_what_does_not_fit_is_refused_in_one_line(school: School) -> None:
    other = other_run(school.folder / "other", school.model, {"reasoner": [0, 1], "actor": [0, 1]})
    with pytest.raises(ConfigError, match=r"reasoner@1 has rank 1, and train\.trainer\.lora\.rank is 4; set it to"):
        begun(school, other, lora={"rank": 4, "alpha": 1.0})
    with pytest.raises(ConfigError, match=r"reasoner@1 has alpha 1, and train\.trainer\.lora\.alpha is 32\.0"):
        begun(school, other, lora={"rank": 1})
    with pytest.raises(ConfigError, match=r"has target_modules \['q_proj', 'v_proj'\], and"):
        begun(school, other, lora={"rank": 1, "alpha": 1.0, "target_modules": ["q_proj"]})
    with pytest.raises(ConfigError, match=r"start_from: .*/run is the folder of this run"):
        begun(school, school.run)
    with pytest.raises(ConfigError, match=r"start_from: .*nowhere holds no run; name the folder of one"):
        begun(school, school.folder / "nowhere")
    untrained = other_run(school.folder / "untrained", school.model, {"reasoner": [0], "else": [0, 1]})
    with pytest.raises(ConfigError, match=r"untrained has trained none of the nodes reasoner, actor"):
        begun(school, untrained)
    stranger = save_school_model(school.folder / "stranger")
    (weights,) = stranger.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(ConfigError, match=r"start_from: adapter v1 of node 'actor' was trained on another base model"):
        begun(school, other_run(school.folder / "third", stranger, {"actor": [1]}))
    (other / "adapters/reasoner/1/adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"start_from: .* is not what was registered"):
        begun(school, other)


def test_nodes_that_share_an_adapter_cannot_begin_from_two(school: School) -> None:
    other = other_run(school.folder / "other", school.model, {"reasoner": [1], "actor": [1]})
    shared = {node: {"adapter": "team"} for node in ("reasoner", "actor")}
    assert begun(school, other, agents=shared) == {"reasoner": 1, "actor": 1}  # zeros, both
    registry = AdapterRegistry(other / "adapters", weights_to_sha256(school.model))
    source, target = Path(registry.get("actor", 1).path), registry.new_folder("actor", 2)
    for file in source.glob("adapter_*"):
        shutil.copyfile(file, target / file.name)
    weights = target / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80\x3f")
    registry.register("actor", 2, None, metrics={})
    with pytest.raises(ConfigError, match="'reasoner' and 'actor' share the adapter 'team' here, and had different"):
        begun(school, other, agents=shared)


def test_the_offline_phase_holds_out_no_task_that_the_other_run_learned_from(tmp_path: Path) -> None:
    """Of 16 tasks two are held out, by content or, without one, by id; none of the 15 that were learned from there."""

    def runs(tasks: range, *, have_content: bool) -> list[Trajectory]:
        made = [make_trajectory([make_action("actor", [3], [5])] * 4, 1.0, task_id=f"t{n}") for n in tasks]
        content = {n: {"id": f"t{n}"} | ({"asks": n} if have_content else {}) for n in tasks}
        return [replace(e, episode=replace(e.episode, task=content[n])) for n, e in zip(tasks, made, strict=True)]

    model_dir = save_tiny_llama(tmp_path / "model")
    options = trainer_options(device="cpu", offline={"mode": "filtered", "threshold": 0.0, "epochs": 1})
    for have_content in (False, True):
        learned, others = (runs(part, have_content=have_content) for part in (range(15), range(15, 16)))
        folder = tmp_path / str(have_content)
        folder.mkdir()
        record_learned_tasks(folder, learned)
        with TraceStore.open(folder / "store.duckdb") as store:
            digests = take_over_learned_tasks(store, tmp_path)
        trainer = MarftTrainer(options, model_dir, AGENTS, 0)
        trainer.policies.save_adapter("actor", tmp_path / f"adapter {have_content}")
        held = {}
        for begins in (False, True):
            if begins:
                trainer = MarftTrainer(options, model_dir, AGENTS, 0)
                trainer.begin_from({"actor": tmp_path / f"adapter {have_content}"}, digests)
            held[begins] = trainer.replay([*learned, *others])["agents"]["actor"]["held_out_actions"]
        assert held == {False: 8, True: 4}  # the one task that is new has four calls


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_version_is_the_other_runs_and_its_tasks_can_be_held_out_no_more(school: School) -> None:
    school.collect()
    school.train(without_signal=True)
    first = school.run
    school.server.adapters.clear()  # of a server that another run used
    school.run = school.folder / "second"
    school.collect(start_from=str(first))
    text = school.train(without_signal=True, start_from=str(first), rounds=1, **OFF)
    assert "version 1 goes on from reasoner@" in text
    version = int(text.partition("goes on from reasoner@")[2].partition(",")[0])
    for node in ("reasoner", "actor"):
        file = f"adapters/{node}/{{}}/adapter_model.safetensors"
        start, begun_from, learned = (
            load_file(path)
            for path in (first / file.format(version), school.run / file.format(1), school.run / file.format(2))
        )
        assert all((begun_from[name] == weight).all() for name, weight in start.items())
        assert any((learned[name] != weight).any() for name, weight in start.items())
    with pytest.raises(ConfigError, match=r"this run began from .*/run, which a resumed one cannot change"):
        school.train(resume=True, without_signal=True, rounds=2, **OFF)
    school.server.adapters.clear()
    school.run = school.folder / "third"
    school.write(list(reversed(TASKS)))  # other tasks are held out
    school.collect(start_from=str(first), heldout=0.5)
    with pytest.raises(ConfigError, match=r"learned from \d+ of the held-out tasks, such as 't\d+'; hold out the same"):
        school.train(without_signal=True, start_from=str(first), heldout=0.5, **OFF)
