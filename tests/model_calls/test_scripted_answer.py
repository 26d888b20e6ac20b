"""Owns: a node whose route holds a text is answered by that text, and its server is not asked.

- Whichever way the node calls its model; the app goes on with the text, the others with their models.
- Such a call is recorded as nobody's action: no tokens, no adapter, a reason; nor does it use up the limit of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.credit_rig import NODES, CreditLab
from support.duo_rig import COMMON, TASKS, Rig
from support.fake_vllm import FakeVllm, running
from support.sessions import session_of

from marft_bridge.common.progress import Reporter
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.episode_plan import plan_episodes
from trace_store.records import Trajectory


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CreditLab]:
    with running(FakeVllm()) as server:
        yield CreditLab(tmp_path, server)


def run(lab: CreditLab, answers: dict[str, str], more: str = "") -> list[Trajectory]:
    """Four episodes in which the other nodes are at version 0."""
    config = lab.config(more)
    app = load_app(config)
    lab.run_folder.create()
    adapters = {node: 0 for node in NODES if node not in answers}
    plan = plan_episodes(app.train_tasks, 4, 1, seed=0, run_id="r", split="train", adapters=adapters)

    def command(reporter: Reporter) -> None:
        with session_of(config, lab.run_folder, reporter) as session:
            session.models.publish(adapters)
            session.run([replace(request, answers=answers) for request in plan], "run", "reward")

    lab.say(command)
    with lab.store() as store:
        return list(store.trajectories(run_ids=["r"]))


@pytest.mark.parametrize("node", [*NODES, "solver"])
def test_a_text_answers_whichever_way_the_node_calls_its_model(lab: CreditLab, node: str) -> None:
    """helper: invoke, idler: ainvoke, harmer: stream, solver: astream, and declared frozen."""
    episodes = run(lab, {node: "hint"})
    assert len(episodes) == 4
    assert {body["messages"][-1]["content"].split()[0] for body in lab.server.asked} == {*NODES, "solver"} - {node}
    for episode in episodes:
        (call,) = [action for action in episode.actions if action.node == node]
        assert (call.completion, call.model, call.finish_reason) == ("hint", "fixed text", "stop")
        assert (call.prompt_ids, call.sampled_ids, call.logprobs) == (None, None, None)
        assert (call.adapter, call.adapter_version, call.temperature, call.seed) == (None, None, 0.0, None)
        assert not call.trainable
        assert call.untrainable_reason == f"node {node} was answered by a fixed text, and no model was asked"
        assert len(episode.actions) == 4
        assert node not in episode.episode.adapters
    heard = [
        body["messages"][-1]["content"] for body in lab.server.asked if "solver" in body["messages"][-1]["content"]
    ]
    assert all("hint" in prompt for prompt in heard)


def test_an_empty_text_is_a_text(lab: CreditLab) -> None:
    episodes = run(lab, {"harmer": "", "helper": ""})
    assert [a.completion for e in episodes for a in e.actions if a.node in ("harmer", "helper")] == [""] * 8
    assert [episode.episode.outcome for episode in episodes] == ["terminated"] * 4


def test_a_text_uses_up_nothing_of_the_limit_of_tokens(lab: CreditLab) -> None:
    """The others write "hm", "idle" and "idle", each with an end: 3 + 5 + 5 tokens; the text has a hundred."""
    episodes = run(lab, {"helper": "x" * 100}, "max_tokens_per_episode = 14")
    assert [episode.episode.outcome for episode in episodes] == ["terminated"] * 4
    assert {sum(len(a.sampled_ids or ()) for a in e.actions) for e in episodes} == {13}


def test_a_scripted_model_is_not_asked_either(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    plan = plan_episodes(TASKS, 3, 1, seed=0, **{**COMMON, "adapters": {"actor": 3}})
    rig.run([replace(request, answers={"reasoner": "no idea"}) for request in plan])
    assert {call.node for call in rig.policy.asked} == {"actor"}
    assert all("no idea" in call.prompt for call in rig.policy.asked)
    with rig.store() as store:
        reasons = {(a.node, a.trainable, a.completion) for e in store.trajectories() for a in e.actions}
    assert ("reasoner", False, "no idea") in reasons
