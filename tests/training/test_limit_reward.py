"""Owns: an agent that goes round in circles until a limit ends its runs learns to stop, where the limit is paid for.

- Such runs are learned from by what a limit is worth; where nobody says, `train` refuses and names the option, and with
  it `score` makes the runs that are stored worth learning from.
- A round that was killed goes on with them, and learns what one learns that was left alone, bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.fake_vllm import FakeVllm, running, text_to_ids
from support.school_rig import School, learned, save_school_model
from support.tiny_policy import make_action

from marft_bridge.commands.score import score
from marft_bridge.common.errors import NoSignalError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.records import OF_LIMIT
from trainers.common.files import weights_to_sha256
from trainers.marft import MarftTrainer

# A talker that is asked again until it says yes: four times at most, then LangGraph ends the run.
LOOP = """

def loop(model):
    graph = StateGraph(State)
    graph.add_node("talker", speaker(model))
    graph.add_edge(START, "talker")
    graph.add_conditional_edges("talker", lambda state: END if state["log"][-1] == "yes" else "talker")
    return graph.compile()


def finished(task, state):
    return 0.0
"""


class LoopSchool(School):
    """A school of the talker, all of whose runs that end by themselves earn the same."""

    limit_reward: float | None = None

    def config(self, heldout: float = 0.25, **train: Any) -> BridgeConfig:
        content = super().config(heldout, **train).model_dump(mode="json", exclude_unset=True)
        apps = self.folder / "apps.py"
        content["graph"] |= {
            "app": f"{apps}:loop",
            "nodes": ["talker"],
            "reward": f"{apps}:finished",
            "config": {"recursion_limit": 4},
            "limit_reward": self.limit_reward,
        }
        return BridgeConfig.model_validate(content)

    def logprob_of(self, text: str, version: int) -> float:
        """Of this answer to the first calls of round 1, by a version of the talker, on average."""
        registry = AdapterRegistry(RunFolder(self.run).adapters, weights_to_sha256(self.model))
        trainer = MarftTrainer(self.config().train.trainer, self.model, ("talker",), seed=0)
        trainer.policies.load_adapter("talker", Path(registry.get("talker", version).path))
        with self.store() as store:
            prompts = [run.actions[0].prompt_ids or () for run in store.trajectories(run_ids=["train"], round=1)]
        answers = [make_action("talker", prompt, text_to_ids(text)) for prompt in prompts]
        return sum(sum(logprobs) for logprobs in trainer.policies.logprobs_of("talker", answers)) / len(answers)


def stop_or_loop(body: dict[str, Any]) -> str:
    """Half of the runs stop at once; the others never do."""
    loops = "no" in body["messages"][-1]["content"] or body["seed"] % 2
    return "no" if loops else "yes"


def open_school(folder: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> LoopSchool:
    folder.mkdir(exist_ok=True)
    school = LoopSchool(folder, save_school_model(folder / "model"), server, monkeypatch)
    server.answer = stop_or_loop
    apps = folder / "apps.py"
    apps.write_text(apps.read_text() + LOOP)
    return school


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with running(FakeVllm()) as opened:
        yield opened


GRPO = {"samples_per_task": 4, "trainer": {"advantage": {"estimator": "grpo"}}}
PUSHED_DOWN = {"trainer": {"objective": {"negative_weight": 1.0}}}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="gae"),
        pytest.param(GRPO, id="grpo", marks=pytest.mark.slow),
        pytest.param(PUSHED_DOWN, id="pushed-down", marks=pytest.mark.slow),
    ],
)
def test_the_node_that_loops_moves_away_from_looping(
    tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    school = open_school(tmp_path, server, monkeypatch)
    school.limit_reward = -1.0
    said = school.collect()
    assert "truncated" in said
    school.train(rounds=2, episodes_per_round=16, **options)
    with school.store() as store:
        runs = list(store.trajectories(run_ids=["train"], round=1))
    cut = [run for run in runs if run.episode.outcome == "truncated"]
    assert 0 < len(cut) < len(runs)
    assert {(run.team_reward("reward"), run.rewards[0].source, len(run.actions)) for run in cut} == {
        (-1.0, OF_LIMIT, 4)
    }
    assert not any(episode.truncated for data in school.rounds for episode in data.episodes)
    lines = read_metrics(RunFolder(school.run).metrics)
    if options is not GRPO:  # the round is one group, and its runs differ
        assert [line["wasted_rollouts"] for line in lines[1:]] == [0.0, 0.0]
    before, after = ({text: school.logprob_of(text, version) for text in ("yes", "no")} for version in (1, 3))
    assert after["yes"] > before["yes"] + 1
    assert after["yes"] - after["no"] > before["yes"] - before["no"] + 1
    if options is PUSHED_DOWN:  # else calls that did worse than expected have no part in the loss
        assert after["no"] < before["no"] - 1


def test_without_what_a_limit_is_worth_train_refuses_and_names_it_and_score_gives_it_to_stored_runs(
    tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    school = open_school(tmp_path, server, monkeypatch)
    school.collect()
    with pytest.raises(NoSignalError, match=r"or say in graph\.limit_reward what a run earns that comes to it"):
        school.train(rounds=1)
    school.limit_reward = -1.0
    score(school.config(), (), Reporter(Console(file=io.StringIO())))
    said = school.train(rounds=1)
    assert "of 20 collected episodes earned more than the worst (-1 to 0" in said
    assert read_metrics(RunFolder(school.run).metrics)[-1]["wasted_rollouts"] == 0.0


@pytest.mark.slow
def test_a_round_of_such_runs_that_was_killed_learns_what_one_learns_that_was_left_alone(
    tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    schools = [open_school(tmp_path / name, server, monkeypatch) for name in ("alone", "killed")]
    alone, killed = schools
    for school in schools:
        school.limit_reward = -1.0
        server.adapters.clear()
        school.collect()
        if school is killed:
            school.train_until_killed(8, rounds=2, episodes_per_round=6)
        school.train(resume=school is killed, rounds=2, episodes_per_round=6)
    with killed.store() as store:
        assert len(store.episodes(run_id="train")) == 12  # none was played twice
    expected, actual = learned(alone), learned(killed)
    assert [name for name in expected if expected[name] != actual.get(name)] == []
