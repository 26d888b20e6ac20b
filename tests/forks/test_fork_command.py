"""Owns: `marft-bridge fork` on served models: what it runs, stores, prints, resumes and refuses.

- Whichever way a node calls its model, calls before the fork get the recorded answer, and the server is not asked.
- It prints a line for each fork, and the mean with its interval beside the parent's reward; `--json` has the same.
- What was interrupted goes on; another plan under the same run is refused.
"""

from __future__ import annotations

import io
import json
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks.test_recorded_prefix import Team, chain
from rich.console import Console
from support.alive import count_while_streaming
from support.credit_rig import NODES, CreditLab
from support.fake_vllm import FakeVllm, running
from support.snippets import Snippet, snippets

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import BridgeError, ConfigError, EpisodesFailedError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.forks.command import ForkOptions, _read_forks, fork
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trace_store.records import Trajectory


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CreditLab]:
    with running(FakeVllm()) as server:
        lab = CreditLab(tmp_path, server)
        collect(lab.config(), lab.reporter(), resume=False)
        server.asked.clear()
        yield lab


def episodes(lab: CreditLab, run_id: str) -> list[Trajectory]:
    with lab.store() as store:
        return list(store.trajectories(run_ids=[run_id], forks=True))


def run_fork(lab: CreditLab, parent: Trajectory, at: str, *, resume: bool = False, **options: Any) -> list[str]:
    chosen = ForkOptions(parent.episode.episode_id, at, **options)
    return lab.say(lambda reporter: fork(lab.config(), chosen, reporter, resume=resume))


def asked(lab: CreditLab) -> Counter[str]:
    return Counter(body["messages"][-1]["content"].split()[0].rstrip(":") for body in lab.server.asked)


@pytest.mark.slow
@pytest.mark.parametrize(("at", "live"), [("idler", 3), ("harmer", 2), ("solver", 1)])
def test_the_server_is_asked_for_what_comes_after_the_fork_only(lab: CreditLab, at: str, live: int) -> None:
    """helper: invoke, idler: ainvoke, harmer: stream, solver: astream, and frozen."""
    parent = episodes(lab, "collect")[0]
    order = [*NODES, "solver"]
    run_fork(lab, parent, at, samples=3)
    assert asked(lab) == dict.fromkeys(order[-live:], 3)
    by_node = {action.node: action for action in parent.actions}
    for each in episodes(lab, "fork-1"):
        for action in each.actions[:-live]:
            recorded = by_node[action.node]
            assert action.replayed_from == recorded.action_id
            assert (action.prompt_ids, action.sampled_ids, action.logprobs, action.seed, action.completion) == (
                *(recorded.prompt_ids, recorded.sampled_ids, recorded.logprobs, recorded.seed, recorded.completion),
            )
        assert [action.replayed_from for action in each.actions[-live:]] == [None] * live
        assert each.episode.fork_action == by_node[at].action_id


@pytest.mark.slow
def test_each_fork_is_a_line_and_the_mean_has_an_interval_beside_the_parents_reward(lab: CreditLab) -> None:
    """At version 0 the helper gives no hint, so the parent has 0; a person's hint makes every fork right."""
    parent = next(each for each in episodes(lab, "collect") if each.episode.task["x"] % 2 == 0)
    said = run_fork(lab, parent, "helper", samples=3, text="hint")
    forks = sorted(episodes(lab, "fork-1"), key=lambda each: each.episode.sample)
    short_id = parent.episode.episode_id[:12]
    assert said[-5:] == [
        f"fork-1: {short_id} at helper, call 1; 0 calls before it given again",
        *(f"sample {number}: {each.episode.episode_id[:12]} reward 1" for number, each in enumerate(forks)),
        "reward: parent 0; 3 forks, mean 1, exact 95% interval 0.292 to 1 if it is always 0 or 1: all forks have the "
        "same",
    ]
    assert {each.episode.variant for each in forks} == {forks[0].episode.variant}
    assert [a.completion for a in forks[0].actions if a.node == "helper"] == ["hint"]


@pytest.mark.slow
def test_a_named_version_answers_for_the_forked_node(lab: CreditLab) -> None:
    config = lab.config()
    registry = config_to_versions(config, lab.run_folder.adapters, lab.reporter().say).registry
    write_zero_adapter(registry.new_folder("helper", 1), lab.folder / "model", ("q_proj", "v_proj"))
    registry.register("helper", 1, 0, {})
    parent = next(each for each in episodes(lab, "collect") if each.episode.task["x"] % 2 == 0)
    run_fork(lab, parent, "helper", samples=2, version="newest")
    forks = episodes(lab, "fork-1")
    assert {each.episode.variant for each in forks} == {"with 1"}
    assert {a.node: a.adapter_version for a in forks[0].actions if a.node != "solver"} == {
        "helper": 1, "idler": 0, "harmer": 0,
    }  # fmt: skip
    assert [reward.value for each in forks for reward in each.rewards if reward.name == "reward"] == [1.0, 1.0]


@pytest.mark.slow
def test_what_was_interrupted_goes_on_and_nothing_runs_twice(lab: CreditLab, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = episodes(lab, "collect")[0]
    original = Collector.request_to_episode

    async def stopped(self: Collector, request: EpisodeRequest, tally: Tally) -> None:
        if request.sample == 2:
            raise KeyboardInterrupt
        await original(self, request, tally)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "request_to_episode", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_fork(lab, parent, "solver", samples=4)
    finished = {each.episode.sample for each in episodes(lab, "fork-1") if each.rewards}
    said = run_fork(lab, parent, "solver", samples=4, resume=True)
    scored = Counter(each.episode.sample for each in episodes(lab, "fork-1") if each.rewards)
    assert scored == dict.fromkeys(range(4), 1)
    assert finished < set(scored)
    assert "4 forks, mean 0," in said[-1]
    with pytest.raises(ConfigError, match="fork-1 began with another episode, call, version, text, seed or tools"):
        run_fork(lab, parent, "harmer", samples=4, resume=True)
    assert not [run for run in ("fork-2",) if episodes(lab, run)]


@pytest.mark.slow
def test_where_most_forks_fail_each_still_has_its_line_and_the_error_comes_after(lab: CreditLab) -> None:
    """The app changed since: its helper is asked otherwise, so that no fork after it begins as its parent did."""
    app = (lab.folder / "app.py").read_text()
    (lab.folder / "changed.py").write_text(app.replace('invoked("helper")', 'invoked("helper now")', 1))
    parent = episodes(lab, "collect")[0]
    lab.config()
    text = (lab.folder / "bridge.toml").read_text().replace("app.py:", "changed.py:")
    (lab.folder / "changed.toml").write_text(text)
    config = toml_to_config(lab.folder / "changed.toml")
    for samples in (2, 8):
        said = io.StringIO()
        reporter = Reporter(Console(file=said, width=300))
        chosen = ForkOptions(parent.episode.episode_id, "solver", samples=samples)
        with pytest.raises(EpisodesFailedError, match=f"{samples} of {samples} episodes failed") as failure:
            fork(config, chosen, reporter, resume=False)
        lines = [line for line in said.getvalue().splitlines() if line.startswith("sample ")]
        assert len(lines) == samples
        assert all(
            "failed: DivergedError: helper, call 1: message 0 (user) differs at word 1" in each for each in lines
        )
        assert said.getvalue().splitlines()[-1] == "reward: parent 0; no fork has a reward"
        assert failure.value.exit_code == 1
    assert lab.server.asked == []


@pytest.mark.slow
def test_what_cannot_be_forked_is_one_line(lab: CreditLab) -> None:
    parent = episodes(lab, "collect")[0]
    for options, words in (
        ({"at": "nobody"}, r"has no call of 'nobody'; it has calls of: helper, idler, harmer, solver"),
        ({"at": ""}, r"say which call to make again with --at NODE\[:K\]"),
        ({"at": "helper", "version": "1", "text": "x"}, "--with and --say both say who answers"),
        ({"at": "helper", "version": "best"}, "'best' is no version"),
        ({"at": "solver", "version": "0"}, "solver is frozen, and has no versions"),
        ({"at": "helper", "version": "7"}, "7"),
    ):
        with pytest.raises(BridgeError, match=words):
            run_fork(lab, parent, **options)
    assert lab.server.asked == []


@pytest.mark.slow
def test_the_command_line_prints_json(lab: CreditLab, capsys: pytest.CaptureFixture[str]) -> None:
    parent = episodes(lab, "collect")[0]
    words = [parent.episode.episode_id[:8], "--config", str(lab.folder / "bridge.toml"), "--at", "solver:1"]
    lab.config()
    assert cli.run(["fork", *words, "--samples", "2", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [each["sample"] for each in findings["forks"]] == [0, 1]
    assert {each["outcome"] for each in findings["forks"]} == {"terminated"}
    assert (findings["node"], findings["call"], findings["given_again"]) == ("solver", 1, 3)
    assert (findings["parent_reward"], findings["mean"]) == (0.0, 0.0)


@pytest.mark.slow
def test_the_commands_of_the_page_run_on_an_episode_that_is_there(
    lab: CreditLab, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/forks.md, with this run's episode, folder and node in place of the page's."""
    registry = config_to_versions(lab.config(), lab.run_folder.adapters, lab.reporter().say).registry
    write_zero_adapter(registry.new_folder("helper", 1), lab.folder / "model", ("q_proj", "v_proj"))
    registry.register("helper", 1, 0, {})
    parent = episodes(lab, "collect")[0].episode.episode_id
    names = {"4be1": parent[:8], "runs/try": str(lab.run_folder.path), "planner:2": "helper:1"}
    lines = [line for found in snippets() if found.page == "docs/forks.md" for line in shown_lines(found)]
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        words = [names.get(word, word) for word in shlex.split(line)[1:]]
        assert len({*words} & {*names.values()}) == 3
        assert cli.run(words) == 0, capsys.readouterr()
        assert {each.episode.parent_episode for each in episodes(lab, f"fork-{number}")} == {parent}


def shown_lines(found: Snippet) -> list[str]:
    return found.text.splitlines() if found.kind == "sh" else []


# -- clients that are no chat model of LangChain --------------------------------------------------------------------

CLIENT_APP = """
from langgraph.graph import START, StateGraph
from openai import AsyncOpenAI, OpenAI
from typing_extensions import TypedDict

WHERE = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "max_retries": 0}


class State(TypedDict, total=False):
    question: str
    plan: str
    draft: str
    answer: str


def messages(text):
    return [{"role": "user", "content": text}]


async def plan(state: State):
    async with AsyncOpenAI(**WHERE) as client:
        answer = await client.chat.completions.create(model="gpt", messages=messages(f"plan {state['question']}"))
        return {"plan": answer.choices[0].message.content}


def draft(state: State):
    with OpenAI(**WHERE) as client:
        chunks = client.chat.completions.create(model="gpt", messages=messages(f"draft {state['plan']}"), stream=True)
        return {"draft": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)}


def answer(state: State):
    with OpenAI(**WHERE) as client:
        reply = client.responses.create(model="gpt", input=f"answer {state['draft']}")
        return {"answer": reply.output_text}


graph = StateGraph(State)
for name, node in (("plan", plan), ("draft", draft), ("answer", answer)):
    graph.add_node(name, node)
for one, other in ((START, "plan"), ("plan", "draft"), ("draft", "answer")):
    graph.add_edge(one, other)
app = graph.compile()


def to_input(task):
    return {"question": f"q{task['x']}"}


def reward(task, state):
    return float(len(state["answer"]))
"""


@pytest.mark.slow
def test_calls_of_other_clients_get_their_recorded_answers_too(tmp_path: Path) -> None:
    with running(FakeVllm()) as server:
        lab = CreditLab(tmp_path, server)
        path = lab.folder / "app.py"
        nodes = 'nodes = ["helper", "idler", "harmer"]\nfrozen = ["solver"]'
        lab.config()
        path.write_text(CLIENT_APP)
        text = (lab.folder / "bridge.toml").read_text()
        assert nodes in text
        text = text.replace(nodes, 'nodes = ["plan", "draft", "answer"]').replace(":build", ":app")
        (lab.folder / "bridge.toml").write_text(text)
        config = toml_to_config(lab.folder / "bridge.toml")
        server.answer = lambda body: body["messages"][-1]["content"].split()[0] + " said"
        collect(config, lab.reporter(), resume=False)
        server.asked.clear()
        parent = episodes(lab, "collect")[0]
        chosen = ForkOptions(parent.episode.episode_id, "answer", samples=2)
        lab.say(lambda reporter: fork(config, chosen, reporter, resume=False))
        assert asked(lab) == {"answer": 2}
        recorded = {action.node: action for action in parent.actions}
        for each in episodes(lab, "fork-1"):
            assert each.episode.outcome == "terminated"
            for action in each.actions[:2]:
                mine, theirs = action, recorded[action.node]
                assert mine.replayed_from == theirs.action_id
                assert (mine.prompt_ids, mine.sampled_ids, mine.logprobs, mine.completion) == (
                    *(theirs.prompt_ids, theirs.sampled_ids, theirs.logprobs, theirs.completion),
                )


def test_what_is_said_of_forks_is_read_one_fork_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    plan = team.plan("b", samples=6)
    team.rig.run(plan)
    counts = count_while_streaming(monkeypatch)
    planned: Any = SimpleNamespace(run_id="fork-1", plan=plan, metric="reward")
    with team.rig.store() as store:
        forks = _read_forks(store, planned)
    assert {sample: each.outcome_text for sample, each in forks.items()} == dict.fromkeys(range(6), "reward 4")
    assert len(counts) == 6
    assert max(counts) <= 2  # the one that was given, and the one before it
