"""Owns: rewards from a bridge.toml to rows in the store, on real LangGraph runs against the stand-in server.

- `collect` writes the rewards of a team, of steps and of agents, each with its source, from tools that really ran.
- An episode over a reward's time is kept without that reward, and the command says how many and why.
- `score` adds rewards to stored episodes without a server, leaves what reads the final state as it was, and is refused
  for a name that nobody declared; the latest reward counts, and every earlier one stays with its time.
- `score` leaves out what was cut short or failed, and says how many, but for what came to a limit where that is paid
  for; its progress shows the means so far; it lets go of an episode when it has been scored.
- What is shown of a reward is its latest value, once.
- What bridge.toml says wrong about rewards is one line.
"""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from support.fake_vllm import Answer, FakeVllm, calls_to_text, running, text_to_ids

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.commands.score import score
from marft_bridge.common import progress
from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, CollectOptions, toml_to_config
from marft_bridge.runs.learning_curve import run_to_learning_curve
from marft_bridge.runs.run_folder import RunFolder
from trace_store.records import Reward, Trajectory
from trace_store.store import TraceStore
from trainers.rewards import ShapingTerm, trajectory_to_rewards

APP = '''
import asyncio
import gc
import threading
import time

from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from trace_store.records import Trajectory


@tool
def add(x: int, y: int) -> int:
    """Adds."""
    if x > 5:
        raise ValueError("too large")
    return x + y


def build(model):
    async def worker(state):
        return {"messages": [await model.bind_tools([add]).ainvoke(state["messages"])]}

    async def writer(state):
        if state["messages"][-1].text == "crash":
            raise ValueError("the writer crashed")
        return {"messages": [await model.ainvoke(state["messages"][-1].text)]}

    graph = StateGraph(MessagesState)
    graph.add_node("worker", worker)
    graph.add_node("tools", ToolNode([add], handle_tool_errors="the tool failed"))
    graph.add_node("writer", writer)
    graph.add_edge(START, "worker")
    graph.add_conditional_edges("worker", tools_condition, {"tools": "tools", END: "writer"})
    graph.add_edge("tools", "worker")
    graph.add_edge("writer", END)
    return graph.compile()


def to_input(task):
    return {"messages": [("user", task["question"])]}


def reward(task, state, run):
    first = run.game().actions[0].action_id
    return {"helped": {"agent:writer": 0.5}, "began": {f"step:{first}": 0.25}}


def size(task, state):
    return task["x"]


def alive(task, state):
    return sum(type(one) is Trajectory for one in gc.get_objects())


def leaving(task, state):
    threading.Thread(target=time.sleep, args=(0.3,), name="left").start()
    return 1.0


async def sleepy(task, state):
    if task["x"] % 2:
        await asyncio.sleep(60)
    return 1.0
'''

REWARDS = """
[[rewards]]
name = "correct"
kind = "numeric"
answer_from = "messages.-1.text"
expected_from = "answer"

[[rewards]]
name = "called"
kind = "tool_selection_accuracy"
expected_from = "tools"

[[rewards]]
name = "errors"
kind = "tool_error_rate"
level = "step"

[[rewards]]
name = "tokens"
kind = "tokens"
level = "agent"

[[rewards]]
name = "reward"
kind = "composite"
weights = { correct = 1.0, called = 0.5 }
"""


def answer(body: dict[str, Any]) -> Answer:
    """The worker asks the tool for x + 1 and repeats what it says; the writer says it once more."""
    last = body["messages"][-1]
    if not body.get("tools"):
        return f"It is {last['content']}."
    if last["role"] == "user":
        return [("add", {"x": int(last["content"].split(" ")[0]), "y": 1})]
    return str(last["content"])


class Lab:
    """A bridge.toml with its app, tasks, model and server; and what was said and stored."""

    def __init__(self, folder: Path, server: FakeVllm) -> None:
        self.folder, self.server = folder, server
        (folder / "app.py").write_text(APP)
        tasks = [{"id": f"t{x}", "question": f"{x} + 1?", "x": x, "answer": x + 1, "tools": ["add"]} for x in range(12)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        (folder / "model").mkdir()
        layer = "model.layers.0.self_attn.{}_proj.weight"
        save_file({layer.format(n): np.zeros((4, 4), np.float32) for n in "qv"}, folder / "model/model.safetensors")
        (folder / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "model/tokenizer.json").write_text("{}")
        (folder / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))

    def config(self, rewards: str, graph: str = "", more: str = "") -> BridgeConfig:
        app = self.folder / "app.py"
        text = f"""
            run = "{self.folder / "run"}"
            [graph]
            app = "{app}:build"
            nodes = ["worker", "writer"]
            tasks = "{self.folder / "tasks.jsonl"}"
            task_to_input = "{app}:to_input"
            {graph}
            [model]
            path = "{self.folder / "model"}"
            [serve]
            attach = "{self.server.url}"
            [collect]
            episodes = 8
            [compare]
            metric = "reward"
            {more}
        """
        path = self.folder / "bridge.toml"
        path.write_text("\n".join(line.strip() for line in text.splitlines()) + rewards)
        return toml_to_config(path)

    def run(self, command: Any, config: BridgeConfig, *arguments: Any) -> list[str]:
        text = io.StringIO()
        reporter = Reporter(Console(file=text, width=300))
        command(config, *((arguments[0], reporter) if command is score else (reporter, bool(arguments))))
        return [line for line in text.getvalue().splitlines() if not line.endswith(" s]")]

    def episodes(self) -> list[Trajectory]:
        with TraceStore.open(RunFolder(self.folder / "run").store) as store:
            return list(store.trajectories(run_ids=["collect"]))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running(FakeVllm()) as server:
        server.answer, server.auto_tools = answer, True
        yield Lab(tmp_path, server)


def one_by_one(config: BridgeConfig) -> BridgeConfig:
    return config.model_copy(update={"collect": CollectOptions(episodes=8, in_flight=1)})


def rows(rewards: tuple[Reward, ...], *names: str) -> set[tuple[Any, ...]]:
    return {(r.name, r.value, r.scope, r.action_id, r.node, r.source) for r in rewards if r.name in names}


def test_collect_writes_the_rewards_of_a_team_of_steps_and_of_agents(lab: Lab) -> None:
    function = f"{lab.folder / 'app.py'}:reward"
    said = lab.run(collect, lab.config(REWARDS, f'reward = "{function}"'))
    assert said[0].startswith("collected 8 terminated")
    episodes = lab.episodes()
    assert len({episode.episode.task["x"] > 5 for episode in episodes}) == 2  # the tool works, and it does not
    for episode in episodes:
        works = float(episode.episode.task["x"] <= 5)
        asks, repeats, writes = episode.actions
        assert (asks.node, repeats.node, writes.node) == ("worker", "worker", "writer")
        assert rows(episode.rewards, "correct", "called", "reward") == {
            ("called", 1.0, "episode", None, None, "tool_selection_accuracy"),
            ("correct", works, "episode", None, None, "numeric"),
            ("reward", works + 0.5, "episode", None, None, "composite"),
        }
        assert rows(episode.rewards, "errors", "began", "helped") == {
            ("began", 0.25, "step", asks.action_id, None, function),
            ("errors", 1.0 - works, "step", asks.action_id, None, "tool_error_rate"),
            ("helped", 0.5, "agent", None, "writer", function),
        }
        tool_said = str(episode.episode.task["answer"]) if works else "the tool failed"
        asked = len(text_to_ids(calls_to_text([("add", {"x": episode.episode.task["x"], "y": 1})])))
        assert rows(episode.rewards, "tokens") == {
            ("tokens", float(asked + len(text_to_ids(tool_said))), "agent", None, "worker", "tokens"),
            ("tokens", float(len(text_to_ids(f"It is {tool_said}."))), "agent", None, "writer", "tokens"),
        }
        # They reach the trainer's shaping, credited by its rules.
        shaping = [ShapingTerm(reward=n, level=at, weight=2.0) for n, at in (("began", "step"), ("helped", "agent"))]
        given, absent = trajectory_to_rewards(episode, ("reward", 1.5), shaping, [(0, 1), (1, 2)], [True] * 3)
        assert absent == []
        assert given.private == {"helped": {"writer": 1.0}}
        assert [(reward.value, dict(reward.links)) for reward in given.step["began"]] == [(0.5, {0: 0})]


def test_an_episode_over_a_rewards_time_is_kept_without_it_and_said(lab: Lab) -> None:
    sleepy = (
        f"[[rewards]]\nname = 'reward'\nkind = 'python'\ntimeout_s = 0.2\nfunction = '{lab.folder / 'app.py'}:sleepy'\n"
    )
    said = lab.run(collect, lab.config(sleepy))
    episodes = lab.episodes()
    odd = [episode for episode in episodes if episode.episode.task["x"] % 2]
    assert 0 < len(odd) < len(episodes) == 8
    for episode in episodes:
        assert episode.team_reward("reward") == (None if episode in odd else 1.0)
        assert len(episode.actions) == 3
    assert f"{len(odd)} of 8 episodes go without the reward 'reward': took longer than 0.2 s" in said


def test_collect_says_what_a_reward_left_running(lab: Lab) -> None:
    function = f"{lab.folder / 'app.py'}:leaving"
    said = lab.run(collect, lab.config(f'[[rewards]]\nname = "reward"\nkind = "python"\nfunction = "{function}"\n'))
    left = f"the reward {function!r} left 8 threads or pieces of work running when its calls returned; they were ended"
    assert left in said


def test_score_adds_rewards_without_a_server_and_leaves_what_needs_the_final_state(lab: Lab) -> None:
    lab.run(collect, lab.config(REWARDS))
    before = {episode.episode.episode_id: episode for episode in lab.episodes()}
    lab.server.asked.clear()
    function = f"{lab.folder / 'app.py'}:reward"
    told = """
        [[rewards]]
        name = "written"
        kind = "numeric"
        answer_from = "node:writer"
        expected_from = "answer"

        [[rewards]]
        name = "steps"
        kind = "step_count"
        budget = 6
    """
    heavier = REWARDS.replace("called = 0.5", "called = 2.0")
    said = lab.run(score, lab.config(heavier + told, f'reward = "{function}"'), ())
    assert "scored 8 episodes" in said
    assert "steps: 8 episodes, mean 0.5" in said
    assert "helped: 8 numbers for agents" in said
    assert "left as they were, because they read the final state, which is not stored: correct" in said
    assert lab.server.asked == []
    for episode in lab.episodes():
        old = before[episode.episode.episode_id]
        assert set(old.rewards) < set(episode.rewards)
        fresh = tuple(reward for reward in episode.rewards if reward not in old.rewards)
        correct = old.team_reward("correct")
        assert correct is not None
        asks = episode.actions[0].action_id
        assert rows(fresh, "written", "steps", "correct", "called", "reward", "errors", "helped") == {
            ("written", correct, "episode", None, None, "score:numeric"),
            ("steps", 0.5, "episode", None, None, "score:step_count"),
            ("called", 1.0, "episode", None, None, "score:tool_selection_accuracy"),
            ("reward", correct + 2.0, "episode", None, None, "score:composite"),
            ("errors", 1.0 - correct, "step", asks, None, "score:tool_error_rate"),
            ("helped", 0.5, "agent", None, "writer", f"score:{function}"),
        }
        assert episode.team_reward("reward") == correct + 2.0  # the latest counts
        assert min(reward.created_ns for reward in fresh) > max(reward.created_ns for reward in old.rewards)


def test_score_of_one_reward_adds_that_one_and_knows_no_other(lab: Lab) -> None:
    config = lab.config(REWARDS)
    lab.run(collect, config)
    before = {reward for episode in lab.episodes() for reward in episode.rewards}
    lab.run(score, config, ["reward"])
    fresh = [reward for episode in lab.episodes() for reward in episode.rewards if reward not in before]
    assert [reward.name for reward in fresh] == ["reward"] * 8
    assert (
        json.loads((lab.folder / "run/bridge.json").read_text())["score"]["config"]["rewards"][0]["name"] == "correct"
    )
    with pytest.raises(
        ConfigError, match=r"score --only: no reward is called 'rewrd'; there are: called, correct, errors"
    ):
        lab.run(score, config, ["rewrd"])


@pytest.mark.slow
def test_each_scoring_adds_a_reward_with_its_own_time_and_takes_none_away(lab: Lab) -> None:
    lab.run(collect, lab.config(REWARDS))
    for weight in (2.0, 3.0):
        lab.run(score, lab.config(REWARDS.replace("called = 0.5", f"called = {weight}")), ["reward"])
    for episode in lab.episodes():
        correct = episode.team_reward("correct")
        assert correct is not None
        history = sorted((r for r in episode.rewards if r.name == "reward"), key=lambda reward: reward.created_ns)
        assert [reward.value for reward in history] == [correct + 0.5, correct + 2.0, correct + 3.0]
        assert [reward.source for reward in history] == ["composite", "score:composite", "score:composite"]
        assert len({reward.created_ns for reward in history}) == 3
        assert episode.team_reward("reward") == correct + 3.0


ENDS = {0: "terminated", 1: "failed", 2: "terminated", 3: "truncated"}


def collect_what_goes_wrong(lab: Lab) -> None:
    """Of the tasks with x = 1, 5, 9 the writer crashes; those with x = 3, 7, 11 ask for tools without end."""

    def answer_some(body: dict[str, Any]) -> Answer:
        question = next((m["content"] for m in body["messages"] if " + 1?" in str(m["content"])), "0 ")
        x = int(question.split(" ")[0])
        return "crash" if x % 4 == 1 else [("add", {"x": 0, "y": 1})] if x % 4 == 3 else answer(body)

    lab.server.answer = answer_some
    limited = CollectOptions(episodes=8, max_tokens_per_episode=400)
    lab.run(collect, lab.config(REWARDS).model_copy(update={"collect": limited}))


TOLD = "[[rewards]]\nname = 'reward'\nkind = 'step_count'\nbudget = 6\n"


def test_score_leaves_out_what_was_cut_short_or_failed_and_says_how_many(lab: Lab) -> None:
    collect_what_goes_wrong(lab)
    before = lab.episodes()
    assert [e.episode.outcome for e in before] == [ENDS[e.episode.task["x"] % 4] for e in before]
    of = {end: [e for e in before if e.episode.outcome == end] for end in ENDS.values()}
    assert all(of.values())
    said = lab.run(score, lab.config(TOLD), ())
    assert f"scored {len(of['terminated'])} episodes" in said
    left_out = f"{len(of['truncated'])} truncated and {len(of['failed'])} failed"
    assert f"left out, because only a run that came to its end has a return: {left_out}" in said
    for episode in lab.episodes():
        if episode.episode.outcome == "terminated":
            assert episode.team_reward("reward") == 0.5  # three calls of six
        else:
            assert episode.rewards == ()


def test_score_gives_runs_that_a_limit_cut_short_what_that_is_worth_by_now(lab: Lab) -> None:
    collect_what_goes_wrong(lab)
    lab.run(score, lab.config(TOLD + TOLD.replace("'reward'", "'short'"), "limit_reward = -2"), ["short"])
    cut = [run for run in lab.episodes() if run.episode.outcome == "truncated"]
    assert cut
    assert all(run.rewards == () for run in cut)  # another reward was asked for
    for value in (-2.0, -3.0):
        said = lab.run(score, lab.config(TOLD, f"limit_reward = {value}"), ["reward"])
        runs = lab.episodes()
        outcomes = [run.episode.outcome for run in runs]
        assert f"scored {outcomes.count('terminated') + outcomes.count('truncated')} episodes" in said
        left_out = "left out, because only a run that came to its end has a return"
        assert f"{left_out}: {outcomes.count('failed')} failed" in said
        for run in runs:
            expected = {"terminated": 0.5, "truncated": value, "failed": None}[run.episode.outcome]
            assert run.team_reward("reward") == expected
            if run.episode.outcome == "truncated":
                assert {reward.source for reward in run.rewards} == {"score:graph.limit_reward"}
                assert not run.is_unfinished("reward")


def test_what_is_scored_shows_the_means_so_far(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    lab.run(collect, lab.config(REWARDS))
    sizes = [episode.episode.task["x"] for episode in lab.episodes()]
    named = "[[rewards]]\nname = '{}'\nkind = 'python'\nfunction = '" + str(lab.folder / "app.py") + ":size'\n"
    config = one_by_one(lab.config("".join(map(named.format, "edcb")) + named.format("reward")))
    text = io.StringIO()
    score(config, (), Reporter(Console(file=text, width=300)))
    shown = [line for line in text.getvalue().splitlines() if line.startswith("score ")]
    assert len(shown) == len(sizes) + 1 == 9
    for done, line in enumerate(shown[:-1], start=1):
        mean = f"{sum(sizes[:done]) / done:.3f}"
        assert line.startswith(f"score {done}/8  b {mean}  c {mean}  d {mean}  e {mean}  and 1 more  [")


@pytest.mark.slow
def test_an_episode_is_let_go_of_when_it_has_been_scored(lab: Lab) -> None:
    lab.run(collect, lab.config(REWARDS))
    told = f"[[rewards]]\nname = 'reward'\nkind = 'python'\nfunction = '{lab.folder / 'app.py'}:alive'\n"
    config = one_by_one(lab.config(told))
    gc.collect()
    lab.run(score, config, ())
    alive = [episode.team_reward("reward") or 0.0 for episode in lab.episodes()]
    assert [count - alive[-1] for count in alive] == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.slow
def test_a_reward_that_was_scored_again_counts_once_in_what_is_shown(lab: Lab) -> None:
    lab.run(collect, lab.config(REWARDS))
    lab.run(score, lab.config(REWARDS.replace("called = 0.5", "called = 10.5")), ["reward"])
    found = [episode.team_reward("correct") or 0.0 for episode in lab.episodes()]
    with TraceStore.open(RunFolder(lab.folder / "run").store) as store:
        (point,) = run_to_learning_curve(store, lab.folder / "run/metrics.jsonl", "reward")
    assert point.episodes == 8
    assert point.reward_mean == pytest.approx(sum(found) / 8 + 10.5)
    more = lab.config(REWARDS).model_copy(update={"collect": CollectOptions(episodes=9)})
    said = lab.run(collect, more, True)
    ninth = lab.episodes()[-1].team_reward("reward")
    assert ninth is not None
    assert f"reward {((sum(found) + 8 * 10.5) + ninth) / 9:.3f}" in " ".join(said)


def test_the_command_line_scores(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.run(collect, lab.config(REWARDS))
    arguments = ["score", "--config", str(lab.folder / "bridge.toml"), "--only", "called", "--only", "errors"]
    assert cli.run(arguments) == 0
    assert "called: 8 episodes, mean 1" in capsys.readouterr().out
    assert cli.run([*arguments, "--run", str(lab.folder / "other")]) == 2
    assert "has no store; run `marft-bridge collect` first" in " ".join(capsys.readouterr().err.split())


def test_a_broken_declared_reward_stops_the_run_by_name(lab: Lab) -> None:
    with pytest.raises(
        GraphError, match=r"rewards\.correct: no 'answr' in task 't\d+' \(looking for 'answr'\); there: "
    ):
        lab.run(collect, lab.config(REWARDS.replace('expected_from = "answer"', 'expected_from = "answr"')))


@pytest.mark.parametrize(
    ("rewards", "graph", "more", "message"),
    [
        ("", "", "", "nothing says what is good: name a function in graph.reward, or declare [[rewards]]"),
        (
            REWARDS.replace("pected_from", "pectd_from"),
            "",
            "",
            "unknown key 'rewards.0.numeric.expectd_from'; did you mean 'expected_from'",
        ),
        (
            REWARDS.replace('"tool_error_rate"', '"tool_eror"'),
            "",
            "",
            "rewards.2: Input tag 'tool_eror' found using 'kind' does not match",
        ),
        (
            REWARDS,
            "",
            "[train.trainer]\nreward = 'score'",
            "train.trainer.reward: no [[rewards]] table gives 'score' with level",
        ),
        (
            REWARDS,
            "",
            "[[train.trainer.shaping]]\nreward = 'errors'\nlevel = 'agent'\nweight = 1",
            "train.trainer.shaping: no [[rewards]] table gives 'errors' with level 'agent'; there are: tokens",
        ),
        (
            REWARDS.replace("metric", "x") + "agent = 'nobody'\n",
            "",
            "",
            "rewards.reward.agent: 'nobody' is not in graph.nodes or graph.frozen",
        ),
        (REWARDS, "reward_timeout_s = 3", "", "graph.reward_timeout_s has no effect without graph.reward"),
        (
            REWARDS.replace("correct = 1.0", "corect = 1.0"),
            "",
            "",
            "rewards.reward: it is computed from 'corect', which is not declared",
        ),
    ],
    ids=range(8),
)
def test_what_bridge_toml_says_wrong_is_one_line(lab: Lab, rewards: str, graph: str, more: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lab.config(rewards, graph, more)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
