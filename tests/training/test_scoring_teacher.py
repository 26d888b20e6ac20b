"""Owns: rounds in which a larger local model scores what the trained nodes say (`train.teacher`), through `train`.

- The trained graph's own answers are learned from, whatever they earned; nobody's own model is asked; rounds after them
  learn from rewards.
- A training that was killed in any round learns what it would have learned.
- A teacher with another tokenizer is refused before anything is started, and so are options that would do nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_rig import save_chat_model, save_chat_tokenizer
from support.fake_vllm import FakeVllm, running
from support.school_rig import School, learned
from support.tiny_policy import save_tiny_llama

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import BridgeConfig, TrainOptions
from marft_bridge.runs.run_folder import read_metrics
from marft_bridge.training.scoring_teacher import round_to_distilled_text


def save_teacher(folder: Path) -> Path:
    """A larger model with the tokenizer of `save_chat_model`, whose embeddings have some rows more."""
    save_tiny_llama(folder, seed=7, vocabulary=352, hidden=64, layers=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return save_chat_tokenizer(folder)


def options_of(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "teacher_rounds": 2,
        "teacher": str(folder / "teacher"),
        "episodes_per_round": 6,
        "trainer": {"offline": {"mode": "off"}, "optimizer": {"lr": 0.01}},
        **options,
    }


def make_school(folder: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> School:
    folder.mkdir(exist_ok=True)
    save_teacher(folder / "teacher")
    return School(folder, save_chat_model(folder / "model"), server, monkeypatch)


def test_the_first_rounds_learn_what_the_teacher_finds_likely_and_the_others_from_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(FakeVllm()) as server:
        school = make_school(tmp_path, server, monkeypatch)
        school.collect()
        asked = len(server.asked)
        said = school.train(**options_of(tmp_path))
        assert len(server.asked) == asked + 3 * 6 * 2  # the served models, once for each call, and nobody else
    lines = [line for line in read_metrics(school.run / "metrics.jsonl") if line["phase"] == "online"]
    assert [line.get("mode") for line in lines] == ["distil_on_policy", "distil_on_policy", None]
    for line in lines[:2]:
        assert (line["episodes"], line["wasted_rollouts"], line["signal"]) == (6, None, True)
        for node in ("reasoner", "actor"):
            figures = line["agents"][node]
            assert figures["actions"] == 6  # right ones and wrong ones
            assert figures["adapter_moved"] > 0
            assert figures["teacher_kl"] < figures["teacher_kl_before"]
    assert f"round 2: {round_to_distilled_text(lines[1])}" in said
    assert "teacher_kl" not in lines[2]["agents"]["actor"]
    assert (school.run / "adapters" / "actor" / "4" / "marft.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, 9, 15])
def test_a_training_that_was_killed_in_any_round_learns_what_it_would_have_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """In the first scored round, in the second, and in the round after them."""
    contents = []
    for name in ("unbroken", "broken"):
        with running(FakeVllm()) as server:
            school = make_school(tmp_path / name, server, monkeypatch)
            options = options_of(tmp_path / name)
            school.collect()
            if name == "broken":
                school.train_until_killed(stop_at, **options)
                school.train(resume=True, **options)
            else:
                school.train(**options)
            contents.append(learned(school))
    assert [key for key in contents[0] if contents[0][key] != contents[1].get(key)] == []


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(FakeVllm()) as server:
        school = make_school(tmp_path, server, monkeypatch)
        school.collect()
        asked = len(server.asked)
        path = tmp_path / "teacher" / "tokenizer.json"
        content = json.loads(path.read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        path.write_text(json.dumps(content))
        expected = (
            r"^train\.teacher: \S+/teacher has another tokenizer than \S+/model: 2 of \d+ tokens have not the same id, "
            r"'a' \(\d+\) among them; name a larger model of the same family, or leave train\.teacher out$"
        )
        with pytest.raises(ConfigError, match=expected):
            school.train(**options_of(tmp_path))
        path.write_text("{}")
        with pytest.raises(ConfigError, match=r"^train\.teacher: cannot read the tokenizer in \S+/teacher: "):
            school.train(**options_of(tmp_path))
        assert len(server.asked) == asked
        assert not (school.run / "metrics.jsonl").exists()


def test_a_scoring_teacher_is_refused_where_it_would_do_nothing_and_needs_no_imitation() -> None:
    with pytest.raises(ValueError, match="teacher has no effect without teacher_rounds"):
        TrainOptions.model_validate({"teacher": "larger"})
    with pytest.raises(ValueError, match="teacher_rounds play whole runs"):
        TrainOptions.model_validate({"teacher": "larger", "teacher_rounds": 2, "trees": {"share": 0.5}})
    options = TrainOptions.model_validate({"teacher": "larger", "teacher_rounds": 2})
    assert (options.asking_rounds, options.trainer.offline.mode) == (0, "awr")
    filtered = {"offline": {"mode": "filtered"}}
    assert TrainOptions.model_validate({"teacher_rounds": 2, "trainer": filtered}).asking_rounds == 2


def test_what_a_run_records_of_a_teacher_by_name_has_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marft_bridge.config.bridge.model_to_pinned", lambda text: f"{text}@c0ffee")
    raw: dict[str, Any] = {"graph": {"app": "a:b", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}}
    taught = BridgeConfig.model_validate(raw | {"train": {"teacher_rounds": 1, "teacher": "some/larger"}})
    assert taught.recorded()["train"]["teacher"] == "some/larger@c0ffee"
    assert BridgeConfig.model_validate(raw).recorded()["train"]["teacher"] is None
