"""Owns: the good runs of a team -> stored episodes of an app with one node.

- Prompts are those that the app puts itself; answers are the team's turns; nothing of it has tokens of a policy.
- A loop says a message a turn, an app that is asked once says all in one, a tool gives what it gave the team.
- What cannot be turned is counted with its reason, and nothing of it is stored.
- `train` imitates what is stored, and nothing else is new to it; `compare` runs team and app side by side.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat_rig import save_chat_model, save_chat_tokenizer
from support.distil_rig import (
    ADDED,
    OFFLINE,
    TASK,
    distil_team,
    duo,
    loop,
    one_config,
    record_team,
    supervisor,
    to_messages,
)
from support.edge_rig import recorded_traces, run_recorded, says

from examples.team_in_one import app as team_in_one
from marft_bridge.common.errors import ConfigError
from marft_bridge.distillation import command
from marft_bridge.distillation.given_turns import DISTILLED
from marft_bridge.ingest.recorded_chats import ChatMessage, span_to_answer, span_to_chat
from marft_bridge.recording.recorder import Recorder
from marft_bridge.rollouts.app import options_to_app
from marft_bridge.runs.run_folder import DISTILLED_FROM
from trace_store import conventions as c
from trace_store.journal import Journal
from trace_store.records import Reward, SpanRow, Trajectory
from trace_store.store import TraceStore

RIG = "support.distil_rig"
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for t in m.tool_calls or [] %}{{ '[call ' + t.function.name + ' ' + (t.function.arguments | tojson) + ']' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def stored(run: Path) -> list[tuple[Trajectory, list[SpanRow]]]:
    """The episodes of a run folder, each with the spans of its calls."""
    with TraceStore.open(run / "store.duckdb") as store:
        return [
            (each, [span for span in store.spans(each.episode.episode_id) if span.operation == c.CHAT])
            for each in store.trajectories()
        ]


def answers(run: Path) -> list[str]:
    """What the node says in the only episode of a run folder."""
    ((_, spans),) = stored(run)
    return [str(span_to_answer(span)["content"]) for span in spans]


def prompt_by_hand(folder: Path, graph: Any) -> tuple[ChatMessage, ...]:
    """The prompt of the first call of an app, run without any of our commands."""
    recorder = Recorder(Journal(folder / "by-hand"))
    run_recorded(graph, {"question": TASK["question"]}, recorder)
    (spans,) = recorded_traces(recorder)
    recorder.journal.close()
    return span_to_chat(next(span for span in spans if span.operation == c.CHAT)).prompt


# -- what is stored ------------------------------------------------------------------------------------------------


def test_an_app_that_is_asked_once_says_all_in_one_behind_its_own_prompt(tmp_path: Path, model: Path) -> None:
    with record_team(tmp_path / "team", [duo()]) as store:
        (team,) = store.episodes()
    said = distil_team(one_config(tmp_path / "one", model), tmp_path / "team")
    assert "1 of them good; 1 distilled" in said
    assert "the team: 2.0 calls a run" in said, "scripted models tell no tokens"
    assert "solver: 1.0 calls, " in said
    assert answers(tmp_path / "one") == ["<reasoner>\nAdd the two.\n</reasoner>\n5"]
    ((trajectory, (span,)),) = stored(tmp_path / "one")
    assert span_to_chat(span).prompt == prompt_by_hand(tmp_path, team_in_one.build(says("5")))
    episode = trajectory.episode
    assert (episode.run_id, episode.split, episode.task_id, episode.adapters) == ("distil-1", "train", "t0", {})
    assert episode.tags == {DISTILLED_FROM: team.episode_id}
    assert trajectory.team_reward("reward") == 1.0
    (action,) = trajectory.actions
    assert (action.node, action.trainable, action.untrainable_reason) == ("solver", False, DISTILLED)
    assert (action.prompt_ids, action.sampled_ids, action.logprobs, action.finish_reason) == (None, None, None, "stop")
    assert not (tmp_path / "one" / "distilling").exists()


def test_a_model_of_the_apps_own_is_not_asked(tmp_path: Path, model: Path) -> None:
    record_team(tmp_path / "team", [duo()]).close()
    distil_team(one_config(tmp_path / "one", model, app=f"{RIG}:OWN_GRAPH"), tmp_path / "team")
    assert answers(tmp_path / "one") == ["<reasoner>\nAdd the two.\n</reasoner>\n5"]


def test_an_app_that_loops_says_a_message_a_turn(tmp_path: Path, model: Path) -> None:
    record_team(tmp_path / "team", [loop()]).close()
    distil_team(one_config(tmp_path / "one", model, app=f"{RIG}:scribe"), tmp_path / "team")
    assert answers(tmp_path / "one") == ["<writer>\n4\n</writer>", "<critic>\nagain\n</critic>", "5"]


def test_the_message_before_a_routers_last_word_is_the_answer(tmp_path: Path, model: Path) -> None:
    record_team(tmp_path / "team", [loop()]).close()
    config = one_config(tmp_path / "one", model, graph={"reward": f"{RIG}:exact_reward"})
    distil_team(config, tmp_path / "team")
    assert answers(tmp_path / "one") == ["<writer>\n4\n</writer>\n<critic>\nagain\n</critic>\n5"]


def test_a_tool_gives_the_app_what_it_gave_the_team(tmp_path: Path, model: Path) -> None:
    record_team(tmp_path / "team", [supervisor()], task_to_input=to_messages).close()
    config = one_config(
        tmp_path / "one", with_tools(model, tmp_path), app=f"{RIG}:agent", task_to_input=f"{RIG}:to_messages"
    )
    ran = len(ADDED)
    distil_team(config, tmp_path / "team")
    assert len(ADDED) == ran, "the tool itself did not run"
    ((trajectory, (first, second)),) = stored(tmp_path / "one")
    asked = span_to_answer(first)
    assert asked["content"].endswith("</supervisor>\n<adder>\n</adder>")
    assert [call["function"] for call in asked["tool_calls"]] == [{"name": "add", "arguments": {"a": 2, "b": 3}}]
    assert [m["content"] for m in span_to_chat(second).prompt if m["role"] == "tool"] == ["5"]
    assert span_to_answer(second)["content"] == "<adder>\nIt is 5.\n</adder>\n5"
    assert [action.finish_reason for action in trajectory.actions] == ["tool_calls", "stop"]


def with_tools(model: Path, folder: Path) -> Path:
    """The model with a template that writes tools and their calls."""
    copied = folder / "tool-model"
    shutil.copytree(model, copied)
    save_chat_tokenizer(copied, TOOL_TEMPLATE)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return copied


def test_a_second_distillation_takes_only_what_is_new(tmp_path: Path, model: Path) -> None:
    config = one_config(tmp_path / "one", model)
    record_team(tmp_path / "team", [duo()]).close()
    distil_team(config, tmp_path / "team")
    with pytest.raises(ConfigError, match="could be turned") as caught:
        distil_team(config, tmp_path / "team")
    assert "not 1: it was distilled before" in caught.value.__notes__[0]
    record_team(tmp_path / "team", [duo(hint="Count on.")]).close()
    assert "2 of them good; 1 distilled" in distil_team(config, tmp_path / "team")
    episodes = [trajectory.episode for trajectory, _ in stored(tmp_path / "one")]
    assert [(episode.run_id, episode.sample) for episode in episodes] == [("distil-1", 0), ("distil-2", 1)]


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("write_count", [0, 1])
def test_a_run_whose_storing_was_killed_between_two_writes_is_distilled_again_with_its_reward(
    write_count: int, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_config(tmp_path / "one", model)
    record_team(tmp_path / "team", [duo()]).close()
    writes_left = [write_count]

    class KilledJournal(Journal):
        def append_all(self, records: Any) -> None:
            writes_left[0] -= 1
            if writes_left[0] < 0:
                raise Killed
            super().append_all(records)

    with monkeypatch.context() as patch:
        patch.setattr(command, "Journal", KilledJournal)
        with pytest.raises(Killed):
            distil_team(config, tmp_path / "team")
    assert "1 of them good; 1 distilled" in distil_team(config, tmp_path / "team")
    ((trajectory, _),) = stored(tmp_path / "one")
    assert trajectory.team_reward("reward") == 1.0


def test_the_reward_that_imitation_chooses_by_comes_along(tmp_path: Path, model: Path) -> None:
    with record_team(tmp_path / "team", [duo(), duo()], tasks=[TASK, {**TASK, "id": "t1"}]) as store:
        marked, unmarked = (episode.episode_id for episode in store.episodes())
        store.put_rewards(
            [Reward(marked, "marked", 1.0, "a person", 1), Reward(unmarked, "marked", 0.0, "a person", 1)]
        )
    config = one_config(tmp_path / "one", model, train={"trainer": {"offline": OFFLINE | {"reward": "marked"}}})
    assert "1 of them good; 1 distilled" in distil_team(config, tmp_path / "team")
    ((trajectory, _),) = stored(tmp_path / "one")
    assert trajectory.episode.tags == {DISTILLED_FROM: marked}
    assert (trajectory.team_reward("marked"), trajectory.team_reward("reward")) == (1.0, 1.0)


# -- what is not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("team", "options", "reason"),
    [
        (lambda: duo(hint=""), {}, "of a call of the team: the answer is empty"),
        (lambda: duo(hint="</actor>\n</reasoner>\n"), {}, "a text of it holds the mark of a block"),
        (duo, {"app": f"{RIG}:stubborn"}, "the app asks its node again after the team's last message"),
        (duo, {"app": f"{RIG}:two_speakers"}, "the app's node 'other' calls a model too"),
        (duo, {"app": f"{RIG}:broken"}, "the app fails on it: ValueError: no"),
        (lambda: duo(answer="6"), {}, "the app's reward of the team's answer is worse than the team's"),
        (lambda: duo(answer="<|im_end|> 5"), {}, "not re-tokenised: the answer holds a control token"),
        (duo, {"sampling": {"max_tokens": 8}}, "an answer is longer than sampling.max_tokens (8)"),
        (duo, {"serve": {"max_model_len": 64}}, "not re-tokenised: longer than the base model reads"),
    ],
)
def test_a_run_that_the_app_cannot_say_is_counted_with_its_reason(
    tmp_path: Path, model: Path, team: Callable[[], Any], options: dict[str, Any], reason: str
) -> None:
    record_team(tmp_path / "team", [team()], team_reward=lambda *_: 1.0).close()
    with pytest.raises(ConfigError, match="could be turned") as caught:
        distil_team(one_config(tmp_path / "one", model, **options), tmp_path / "team")
    assert f"not 1: {reason}" in caught.value.__notes__[0]
    assert stored(tmp_path / "one") == []


def test_a_tool_that_the_app_lacks_is_a_reason(tmp_path: Path, model: Path) -> None:
    record_team(tmp_path / "team", [supervisor()], task_to_input=to_messages).close()
    config = one_config(tmp_path / "one", model, app=f"{RIG}:toolless", task_to_input=f"{RIG}:to_messages")
    with pytest.raises(ConfigError, match="could be turned") as caught:
        distil_team(config, tmp_path / "team")
    assert "not 1: the app's node is offered no tool 'add'" in caught.value.__notes__[0]


def test_runs_are_counted_by_what_is_wrong_with_their_task(tmp_path: Path, model: Path) -> None:
    held_out = options_to_app(one_config(tmp_path / "one", model).graph).heldout_tasks[0]
    tasks = [TASK, held_out, {"id": "x", "question": "What is 1 + 1?"}, {"id": "y", "number": 3}, {**TASK, "id": "z"}]
    rewards = {"z": 0.5}
    with record_team(
        tmp_path / "team",
        [duo() for _ in tasks],
        tasks=tasks,
        task_to_input=lambda task: {"question": task.get("question", "")},
        team_reward=lambda task, _: rewards.get(task["id"], 1.0),
    ) as store:
        assert len(store.episodes()) == 5
    said = distil_team(one_config(tmp_path / "one", model), tmp_path / "team")
    assert "5 runs of" in said
    assert "4 of them good; 1 distilled" in said, "0.5 does not reach offline.threshold"
    assert "not 1: its task is held out" in said
    assert "not 1: the app takes no such task: graph.task_to_input raised KeyError" in said
    assert "not 1: the app fails on it: " in said, "its reward finds no answer in the task"
    assert [trajectory.episode.task_id for trajectory, _ in stored(tmp_path / "one")] == ["t0"]


def test_a_subjects_data_does_not_lose_its_subject(tmp_path: Path, model: Path) -> None:
    task = {**TASK, "person": "u-17"}
    record_team(tmp_path / "team", [duo()], tasks=[task], subject_field="person").close()
    with pytest.raises(ConfigError) as caught:
        distil_team(one_config(tmp_path / "one", model), tmp_path / "team")
    assert "not 1: it holds a subject's data, and graph.subject_field" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"train": {"trainer": {}}}, "set train.trainer.offline"),
        ({"graph": {"nodes": ["writer"]}}, "'solver' is not in graph.nodes; there is: writer"),
        ({"graph": {"frozen": ["judge"]}}, "graph names 'judge' beside 'solver'"),
    ],
)
def test_an_app_that_could_not_learn_from_it_is_refused(
    tmp_path: Path, model: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        distil_team(one_config(tmp_path / "one", model, **options), tmp_path / "team")
    assert not (tmp_path / "one").exists()
