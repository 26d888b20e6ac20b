"""Owns: a fork gives the recorded answers again up to its call, and samples from there on.

- What is given again has the parent's tokens, log-probs and sampling; the forked call and what depends on it is live.
- A call is known by its node, its prompt and its order; siblings that were under way keep their answers.
- A fork that does not begin as its parent did is a failed row with the divergence, also where the graph catches it.
- Forks run beside each other, and a finished one is not run again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send, interrupt
from support.duo_rig import Rig

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.forks.fork_plan import ForkChange, plan_forks, spans_to_parent, text_to_call, text_to_prefix
from marft_bridge.forks.recorded_prefix import actions_to_dependents
from marft_bridge.model_calls.scripted_model import END_OF_TURN, text_to_ids
from marft_bridge.rollouts.episode_plan import EpisodeRequest, unfinished_requests
from trace_store.conventions import BEGINS, OUTPUT_MESSAGES, REQUEST_CHOICES
from trace_store.records import REPLAYED, Action, Edge, Trajectory

TASK = {"id": "t", "question": "q", "answer": 1}


class State(TypedDict):
    words: Annotated[list[str], operator.add]


class Team:
    """A graph on the scripted policy, its one stored episode, and the forks of it. Answers count up over all calls."""

    def __init__(self, folder: Path, build: Callable[[Any], Any], nodes: tuple[str, ...], **options: Any) -> None:
        self.counter, lock = Counter[str](), threading.Lock()

        def script(node: str, prompt: str, chance: random.Random) -> str:
            with lock:
                self.counter[node] += 1
                return f"{node}{self.counter[node]}-{chance.randrange(10**6)}"

        self.adapters = dict.fromkeys(nodes, 1)
        outcome = options.pop("outcome", "terminated")
        options = {"reward": lambda task, state: float(len(state["words"]))} | options
        self.rig = Rig(folder, script, build=build, **options)
        self.rig.collector._app = replace(  # type: ignore[misc]
            self.rig.collector._app, task_to_input=lambda task: {"words": [str(task["question"])]}
        )
        request = EpisodeRequest("run", TASK, "train", sample=0, seed=7, adapters=self.adapters)
        assert self.rig.run([request]).outcomes == {outcome: 1}
        (self.parent,) = self.episodes("run")
        self.live_calls = Counter(self.counter)

    def episodes(self, run_id: str) -> list[Trajectory]:
        with self.rig.store() as store:
            return list(store.trajectories(run_ids=[run_id], forks=True))

    def plan(self, at: str, samples: int = 1, change: ForkChange = ForkChange()) -> list[EpisodeRequest]:  # noqa: B008 - frozen
        with self.rig.store() as store:
            run = spans_to_parent(store.spans(self.parent.episode.episode_id))
        prefix = text_to_prefix(run, at, change.text)
        return plan_forks(run, prefix, change, run_id="fork-1", samples=samples, seed=0)

    def fork(self, at: str, samples: int = 1, change: ForkChange = ForkChange()) -> list[Trajectory]:  # noqa: B008
        self.rig.run(self.plan(at, samples, change))
        return self.episodes("fork-1")

    def sampled_since(self) -> dict[str, int]:
        """How many calls of each node were sampled since the parent ended."""
        return dict(self.counter - self.live_calls)


def chain(model: Any) -> Any:
    """a, b, c: each reads all that was said before it."""
    graph = StateGraph(State)

    def call(name: str) -> Callable[[State], dict[str, Any]]:
        return lambda state: {"words": [model.invoke(f"{name} " + " ".join(state["words"])).text]}

    for name in "abc":
        graph.add_node(name, call(name))
    for one, other in zip([START, *"abc"], [*"abc", END], strict=True):
        graph.add_edge(one, other)
    return graph.compile()


def by_node(trajectory: Trajectory) -> dict[str, Action]:
    return {action.node: action for action in trajectory.actions}


def sampling(action: Action) -> tuple[Any, ...]:
    return (
        *(action.prompt_ids or (), action.sampled_ids, action.logprobs, action.completion),
        *(action.model, action.adapter, action.adapter_version, action.temperature, action.top_p),
        *(action.max_tokens, action.seed, action.finish_reason, action.prompt_tokens, action.sampled_tokens),
    )


def test_calls_before_the_fork_are_the_parents_to_the_token_and_later_ones_are_sampled(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    (fork,) = team.fork("b")
    mine, parents = by_node(fork), by_node(team.parent)
    assert sampling(mine["a"]) == sampling(parents["a"])
    assert mine["a"].replayed_from == parents["a"].action_id
    assert (mine["a"].trainable, mine["a"].untrainable_reason) == (False, REPLAYED)
    assert team.sampled_since() == {"b": 1, "c": 1}
    assert mine["b"].prompt_ids == parents["b"].prompt_ids
    assert mine["b"].completion != parents["b"].completion
    assert mine["b"].sampled_ids == (*text_to_ids(mine["b"].completion or ""), END_OF_TURN)
    assert (mine["b"].completion or "-") in bytes(mine["c"].prompt_ids or ()).decode()
    assert [mine[node].replayed_from for node in "bc"] == [None, None]
    assert mine["b"].trainable
    assert mine["c"].trainable
    episode = fork.episode
    assert (episode.parent_episode, episode.fork_action) == (team.parent.episode.episode_id, parents["b"].action_id)
    assert (episode.outcome, [reward.value for reward in fork.rewards]) == ("terminated", [4.0])


def test_the_tokens_of_a_round_count_what_was_sampled_and_a_limit_counts_the_episodes(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    tally = team.rig.run(team.plan("c"))
    (fork,) = team.episodes("fork-1")
    assert tally.sampled_tokens == len(by_node(fork)["c"].sampled_ids or ())


def test_each_fork_has_a_seed_of_its_own_and_many_run_beside_each_other(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"), delay_s=0.01)
    forks = team.fork("b", samples=12)
    assert len(forks) == 12
    assert {fork.episode.outcome for fork in forks} == {"terminated"}
    assert len({by_node(fork)["b"].seed for fork in forks}) == 12
    assert {by_node(fork)["a"].completion for fork in forks} == {by_node(team.parent)["a"].completion}
    assert team.sampled_since() == {"b": 12, "c": 12}


def test_a_finished_fork_is_not_run_again_and_is_not_taken_for_a_sample_of_its_task(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    plan = team.plan("b", samples=3)
    team.rig.run(plan[:2])
    with team.rig.store() as store:
        assert unfinished_requests(store, plan) == plan[2:]
        assert unfinished_requests(store, [replace(plan[0], fork=None)]) != []
        assert unfinished_requests(store, [replace(each, variant="with 2") for each in plan]) != []
        assert store.episodes(run_id="fork-1") == []


def test_a_text_can_answer_the_forked_call(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    (fork,) = team.fork("b", change=ForkChange(text="a person's word"))
    mine = by_node(fork)
    assert (mine["b"].completion, mine["b"].sampled_ids, mine["b"].trainable) == ("a person's word", None, False)
    assert "a person's word" in bytes(mine["c"].prompt_ids or ()).decode()
    assert team.sampled_since() == {"c": 1}
    assert fork.episode.variant == ForkChange(text="a person's word").variant
    assert fork.episode.variant != ForkChange(text="another").variant


def test_a_version_answers_for_the_forked_node_from_the_fork_on(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    (fork,) = team.fork("b", change=ForkChange(version=5))
    assert {node: action.adapter_version for node, action in by_node(fork).items()} == {"a": 1, "b": 5, "c": 1}
    assert fork.episode.variant == "with 5"


# -- which call is which ------------------------------------------------------------------------------------------


def loop(model: Any) -> Any:
    """One node that calls three times, on what it said before."""
    graph = StateGraph(State)
    graph.add_node("a", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda state: END if len(state["words"]) > 3 else "a")
    return graph.compile()


def test_a_loop_is_left_at_the_named_call_of_its_node(tmp_path: Path) -> None:
    team = Team(tmp_path, loop, ("a",))
    (fork,) = team.fork("a:2")
    first, *_ = team.parent.actions
    assert [action.replayed_from for action in fork.actions] == [first.action_id, None, None]
    assert fork.episode.fork_action == team.parent.actions[1].action_id
    assert team.sampled_since() == {"a": 2}


def same_prompt(model: Any) -> Any:
    """One node that makes the same call three times."""
    graph = StateGraph(State)
    graph.add_node("a", lambda _: {"words": [model.invoke("once more").text for _ in range(3)]})
    graph.add_edge(START, "a")
    graph.add_edge("a", END)
    return graph.compile()


def test_equal_calls_are_told_apart_by_their_order(tmp_path: Path) -> None:
    team = Team(tmp_path, same_prompt, ("a",))
    parents = team.parent.actions
    (fork,) = team.fork("a:3")
    assert [action.replayed_from for action in fork.actions] == [parents[0].action_id, parents[1].action_id, None]
    assert [a.completion for a in fork.actions[:2]] == [a.completion for a in parents[:2]]


def fan_out(model: Any) -> Any:
    """Three workers beside each other, and one call that reads them all."""
    graph = StateGraph(State)

    async def work(state: dict[str, Any]) -> dict[str, Any]:
        return {"words": [(await model.ainvoke(f"part {state['part']}")).text]}

    graph.add_node("work", work)
    graph.add_node("join", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
    graph.add_conditional_edges(START, lambda _: [Send("work", {"part": part}) for part in range(3)], ["work"])
    graph.add_edge("work", "join")
    graph.add_edge("join", END)
    return graph.compile()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_siblings_of_the_forked_call_keep_their_answers(tmp_path: Path, number: int) -> None:
    team = Team(tmp_path, fan_out, ("work", "join"), delay_s=0.05)
    (fork,) = team.fork(f"work:{number}")
    assert team.sampled_since() == {"work": 1, "join": 1}
    parents = {action.action_id: action for action in team.parent.actions}
    workers = [action for action in fork.actions if action.node == "work"]
    given = [action for action in workers if action.replayed_from is not None]
    assert len(given) == 2
    assert {action.replayed_from for action in given} == (
        {action.action_id for action in parents.values() if action.node == "work"} - {fork.episode.fork_action}
    )
    for action in given:
        assert sampling(action) == sampling(parents[action.replayed_from or ""])


def branches(model: Any) -> Any:
    """left, then after; right beside both, and only at the end: no call depends on one of the other branch."""
    graph = StateGraph(State)

    def left(_: State) -> dict[str, Any]:
        return {"words": [model.invoke("left").text]}

    def right(_: State) -> dict[str, Any]:
        return {"words": [model.invoke("right").text]}

    for name, node in (("left", left), ("right", right)):
        graph.add_node(name, node)
    graph.add_node("after", lambda _: {"words": [model.invoke("after, which reads nothing").text]})
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_edge("left", "after")
    graph.add_edge("after", END)
    return graph.compile()


def test_what_began_after_the_forked_call_is_sampled_again_though_it_reads_nothing_of_it(tmp_path: Path) -> None:
    team = Team(tmp_path, branches, ("left", "right", "after"), delay_s=0.02)
    (fork,) = team.fork("left")
    assert fork.episode.outcome == "terminated"
    assert {node: action.replayed_from is not None for node, action in by_node(fork).items()} == {
        "left": False,
        "right": True,
        "after": False,
    }


def test_a_call_of_another_branch_that_comes_before_the_forked_one_this_time_is_no_divergence(tmp_path: Path) -> None:
    """In the parent right began after left had ended; in the fork at left it is the first call of all."""

    def build(model: Any) -> Any:
        graph = StateGraph(State)
        waits = {"left": [0.0, 0.2], "right": [0.2, 0.0]}

        def call(name: str) -> Callable[[State], dict[str, Any]]:
            def node(_: State) -> dict[str, Any]:
                time.sleep(waits[name].pop(0))
                return {"words": [model.invoke(name).text]}

            return node

        for name in waits:
            graph.add_node(name, call(name))
            graph.add_edge(START, name)
            graph.add_edge(name, END)
        return graph.compile()

    team = Team(tmp_path, build, ("left", "right"))
    assert [action.node for action in team.parent.actions] == ["left", "right"]
    (fork,) = team.fork("left")
    assert [action.node for action in fork.actions] == ["right", "left"]
    assert (fork.episode.outcome, team.sampled_since()) == ("terminated", {"left": 1, "right": 1})


def two_chains(waits_s: dict[str, list[float]], *, is_async: bool, words: Callable[[], str] = str) -> Any:
    """One node with two chains of two calls beside each other; each works before its first call."""

    def build(model: Any) -> Any:
        async def achain(name: str) -> str:
            await asyncio.sleep(waits_s[name].pop(0))
            first = (await model.ainvoke(f"{name}1")).text
            await asyncio.sleep(waits_s[name].pop(0))
            return (await model.ainvoke(f"{name}2 {first}{words()}")).text

        def chain(name: str) -> str:
            time.sleep(waits_s[name].pop(0))
            first = model.invoke(f"{name}1").text
            time.sleep(waits_s[name].pop(0))
            return model.invoke(f"{name}2 {first}{words()}").text

        async def anode(_: State) -> dict[str, Any]:
            return {"words": list(await asyncio.gather(achain("a"), achain("b")))}

        both = RunnableParallel(a=RunnableLambda(lambda _: chain("a")), b=RunnableLambda(lambda _: chain("b")))
        graph = StateGraph(State)
        graph.add_node("n", anode if is_async else lambda _: {"words": list(both.invoke(None).values())})
        graph.add_edge(START, "n")
        graph.add_edge("n", END)
        return graph.compile()

    return build


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "loop"])
def test_a_call_that_depends_on_the_forked_one_by_time_alone_waits_where_it_comes_first(
    tmp_path: Path, is_async: bool
) -> None:
    """In the parent b2 began after a1 had ended; in the fork it is asked as it was before a1 is, which comes late."""
    waits_s = {"a": [1.0, 0.0, 1.5, 0.0], "b": [0.0, 1.6, 0.0, 0.0]}
    team = Team(tmp_path, two_chains(waits_s, is_async=is_async), ("n",))
    prompts = [bytes(action.prompt_ids or ()).decode() for action in team.parent.actions]
    number = 1 + next(number for number, prompt in enumerate(prompts) if "a1" in prompt)
    (fork,) = team.fork(f"n:{number}")
    assert (fork.episode.outcome, fork.episode.reason, team.sampled_since()) == ("terminated", None, {"n": 3})
    assert [action.replayed_from is not None for action in fork.actions] == [True, False, False, False]


def test_an_early_call_whose_prompt_is_new_each_time_waits_too_and_fails_where_the_forked_one_does_not_come(
    tmp_path: Path,
) -> None:
    waits_s = {"a": [0.2, 0.0, 0.5, 0.0, 4.0, 0.0], "b": [0.0, 0.6, 0.0, 0.0, 0.0, 0.0]}
    numbers = itertools.count()
    team = Team(tmp_path, two_chains(waits_s, is_async=True, words=lambda: str(next(numbers))), ("n",))
    first, second = team.plan("n:2", samples=2)
    team.rig.run([first])
    (fork,) = team.episodes("fork-1")
    assert (fork.episode.outcome, team.sampled_since()) == ("terminated", {"n": 3})
    team.rig.run([second])
    _, fork = team.episodes("fork-1")
    assert (fork.episode.outcome, team.sampled_since()) == ("failed", {"n": 3})
    assert "n, call 2: message 0 (user) differs" in str(fork.episode.reason)


def with_memory(model: Any) -> Any:
    """A chain with a checkpointer, as a chat has one."""
    return chain(model).builder.compile(checkpointer=InMemorySaver())


def test_an_app_with_a_checkpointer_is_forked_from_its_beginning(tmp_path: Path) -> None:
    team = Team(tmp_path, with_memory, ("a", "b", "c"))
    (fork,) = team.fork("c")
    assert (fork.episode.outcome, team.sampled_since()) == ("terminated", {"c": 1})
    assert sampling(by_node(fork)["b"]) == sampling(by_node(team.parent)["b"])


def asking(asks: list[bool]) -> Callable[[Any], Any]:
    """a, then a node that asks a person where the next of `asks` says so, then b."""

    def build(model: Any) -> Any:
        graph = StateGraph(State)
        graph.add_node("a", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
        graph.add_node("ask", lambda _: {"words": [interrupt("well?")] if asks.pop(0) else []})
        graph.add_node("b", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
        for one, other in ((START, "a"), ("a", "ask"), ("ask", "b"), ("b", END)):
            graph.add_edge(one, other)
        return graph.compile(checkpointer=InMemorySaver())

    return build


def test_a_run_that_was_interrupted_is_forked_up_to_where_it_stopped_or_on_from_there(tmp_path: Path) -> None:
    team = Team(tmp_path, asking([True, True, False]), ("a", "b"), outcome="truncated")
    forks = team.fork("a", samples=2)
    assert Counter((each.episode.outcome, each.episode.reason) for each in forks) == {
        ("truncated", "interrupted"): 1, ("terminated", None): 1,
    }  # fmt: skip
    assert sorted(len(each.rewards) for each in forks) == [0, 1]
    assert team.sampled_since() == {"a": 2, "b": 1}


def test_a_fork_that_is_interrupted_before_its_call_has_failed(tmp_path: Path) -> None:
    team = Team(tmp_path, asking([False, True]), ("a", "b"))
    (fork,) = team.fork("b")
    assert (fork.episode.outcome, fork.rewards) == ("failed", ())
    assert fork.episode.reason == "DivergedError: b, call 1: this call is not made any more"


def chain_with_ids(model: Any) -> Any:
    """As `chain`, of two ids that a draws: b reads both, c reads one of them and what b said of it."""
    graph = StateGraph(State)

    def start(state: State) -> dict[str, Any]:
        ticket, user = str(uuid.uuid4()), uuid.uuid4().hex
        return {"words": [ticket, user, model.invoke(f"a open {ticket} for {user}").text]}

    def work(state: State) -> dict[str, Any]:
        return {"words": [model.invoke(f"b work on {state['words'][1]} of {state['words'][2]}").text]}

    def close(state: State) -> dict[str, Any]:
        return {"words": [model.invoke(f"c close {state['words'][1]}: " + " ".join(state["words"][3:])).text]}

    for name, node in zip("abc", (start, work, close), strict=True):
        graph.add_node(name, node)
    for one, other in zip([START, *"abc"], [*"abc", END], strict=True):
        graph.add_edge(one, other)
    return graph.compile()


@pytest.mark.parametrize("at", ["b", "c"])
def test_ids_that_a_run_draws_are_the_forks_own_and_go_by_number(at: str, tmp_path: Path) -> None:
    team = Team(tmp_path, chain_with_ids, ("a", "b", "c"))
    (fork,) = team.fork(at)
    assert fork.episode.outcome == "terminated", fork.episode.reason
    mine, parents = by_node(fork), by_node(team.parent)
    assert mine["a"].replayed_from == parents["a"].action_id
    assert mine["a"].completion == parents["a"].completion
    assert team.sampled_since() == ({"b": 1, "c": 1} if at == "b" else {"c": 1})
    (ticket,), (own_ticket,) = (
        {word for word in bytes(each["c"].prompt_ids or ()).decode().split() if word.count("-") == 4}
        for each in (parents, mine)
    )
    assert ticket != own_ticket


def test_a_fork_of_a_fork_and_many_beside_each_other_draw_ids_of_their_own(tmp_path: Path) -> None:
    team = Team(tmp_path, chain_with_ids, ("a", "b", "c"))
    forks = team.fork("b", samples=6)
    assert [fork.episode.outcome for fork in forks] == ["terminated"] * 6
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(forks[0].episode.episode_id))
    requests = plan_forks(run, text_to_prefix(run, "c", None), ForkChange(), run_id="fork-2", samples=2, seed=0)
    team.rig.run(requests)
    assert [fork.episode.outcome for fork in team.episodes("fork-2")] == ["terminated"] * 2


def test_two_prompts_that_differ_in_which_ids_are_equal_are_different(tmp_path: Path) -> None:
    swaps = [False]

    def build(model: Any) -> Any:
        graph = StateGraph(State)

        def first(state: State) -> dict[str, Any]:
            one, other = str(uuid.uuid4()), str(uuid.uuid4())
            words = [one, other, model.invoke(f"a {one} {other}").text]
            return {"words": words[1::-1] + words[2:] if swaps[0] else words}

        def second(state: State) -> dict[str, Any]:
            return {"words": [model.invoke(f"b {state['words'][1]}").text]}

        def third(state: State) -> dict[str, Any]:
            return {"words": [model.invoke("c").text]}

        for name, node in zip("abc", (first, second, third), strict=True):
            graph.add_node(name, node)
        for one, other in zip([START, *"abc"], [*"abc", END], strict=True):
            graph.add_edge(one, other)
        return graph.compile()

    team = Team(tmp_path, build, ("a", "b", "c"))
    swaps[0] = True
    (fork,) = team.fork("c")
    assert fork.episode.outcome == "failed"
    assert "b, call 1: message 0 (user) differs at word 1: recorded" in (fork.episode.reason or "")


def test_a_fork_can_be_forked(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    (team.parent,) = team.fork("b")
    plan = [replace(each, run_id="fork-2") for each in team.plan("c")]
    team.rig.run(plan)
    (second,) = team.episodes("fork-2")
    mine, parents = by_node(second), by_node(team.parent)
    for node in "ab":
        assert mine[node].replayed_from == parents[node].action_id
        assert sampling(mine[node]) == sampling(parents[node])
    assert mine["c"].completion != parents["c"].completion


def test_what_depends_on_an_action_is_found_over_others_and_once() -> None:
    edges = [Edge("e", src, dst, "state", exact) for src, dst, exact in [
        ("a", "b", True), ("b", "c", False), ("a", "c", True), ("c", "d", True), ("x", "d", True), ("x", "y", True)
    ]]  # fmt: skip
    assert actions_to_dependents(edges, "a") == {"b", "c", "d"}
    assert actions_to_dependents(edges, "x") == {"d", "y"}
    assert actions_to_dependents(edges, "d") == set()


# -- what goes otherwise ------------------------------------------------------------------------------------------


def drifting(runs: list[int], *, catches: bool = False) -> Callable[[Any], Any]:
    """A chain whose first prompt has the number of the run in it."""

    def build(model: Any) -> Any:
        graph = StateGraph(State)

        def a(_: State) -> dict[str, Any]:
            runs.append(1)
            try:
                return {"words": [model.invoke(f"run {len(runs)} please").text]}
            except RuntimeError:
                if not catches:
                    raise
                return {"words": ["never mind"]}

        graph.add_node("a", a)
        graph.add_node("b", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
        graph.add_edge(START, "a")
        graph.add_edge("a", "b")
        graph.add_edge("b", END)
        return graph.compile()

    return build


def test_another_prompt_before_the_fork_is_a_failed_row_with_the_place_and_nothing_is_sampled(tmp_path: Path) -> None:
    team = Team(tmp_path, drifting([]), ("a", "b"))
    (fork,) = team.fork("b")
    assert (fork.episode.outcome, team.sampled_since(), fork.rewards) == ("failed", {}, ())
    assert fork.episode.reason == (
        "DivergedError: a, call 1: message 0 (user) differs at word 1:"
        ' recorded "1 please", now "2 please"'
    )  # fmt: skip


def test_a_graph_that_catches_the_divergence_fails_all_the_same(tmp_path: Path) -> None:
    team = Team(tmp_path, drifting([], catches=True), ("a", "b"))
    (fork,) = team.fork("b")
    assert (fork.episode.outcome, team.sampled_since(), fork.rewards) == ("failed", {}, ())
    assert "a, call 1: message 0 (user) differs" in (fork.episode.reason or "")


def shrinking(runs: list[int]) -> Callable[[Any], Any]:
    """A graph that calls in its first run only."""

    def build(model: Any) -> Any:
        graph = StateGraph(State)

        def a(_: State) -> dict[str, Any]:
            runs.append(1)
            return {"words": [model.invoke("hello").text] if len(runs) == 1 else []}

        graph.add_node("a", a)
        graph.add_edge(START, "a")
        graph.add_edge("a", END)
        return graph.compile()

    return build


def test_a_fork_that_never_comes_to_its_call_is_a_failed_row(tmp_path: Path) -> None:
    team = Team(tmp_path, shrinking([]), ("a",))
    (fork,) = team.fork("a")
    assert (fork.episode.outcome, fork.rewards) == ("failed", ())
    assert fork.episode.reason == "DivergedError: a, call 1: this call is not made any more"


# -- what is refused ----------------------------------------------------------------------------------------------


def test_a_place_that_is_not_one_call_is_refused_with_what_there_is(tmp_path: Path) -> None:
    team = Team(tmp_path, loop, ("a",))
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    assert text_to_call(run, "a:3").number == 3
    for at, words in (
        ("a", "a made 3 calls; say which, as --at a:1"),
        ("a:4", "there is no call 4 of a; it made 3"),
        ("a:0", "there is no call 0 of a"),
        ("z:1", "has no call of 'z'; it has calls of: a"),
    ):
        with pytest.raises(ConfigError, match=words):
            text_to_call(run, at)


def test_a_run_that_goes_on_with_another_one_is_refused_where_a_command_has_to_have_started_it(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    with team.rig.store() as store:
        spans = store.spans(team.parent.episode.episode_id)
    resumed = [
        replace(span, attributes=span.attributes | {BEGINS: "resume"}) if span.parent_span_id is None else span
        for span in spans
    ]
    with pytest.raises(GraphError, match="was started by its app, not by a command; `marft-bridge fork` can fork it"):
        spans_to_parent(resumed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attributes": {REQUEST_CHOICES: 2}}, r"asked for several answers in episode \w+ \(node a, call 1\)"),
        ({"status": "error", "status_message": "OSError: cut"}, "a call before it failed in episode"),
    ],
    ids=["several answers", "failed"],
)
def test_a_call_without_one_whole_answer_before_the_fork_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    with team.rig.store() as store:
        spans = store.spans(team.parent.episode.episode_id)
    first_id = team.parent.actions[0].action_id
    changed = [
        replace(span, **(change | {"attributes": span.attributes | change.get("attributes", {})}))
        if span.span_id == first_id
        else span
        for span in spans
    ]
    run = spans_to_parent(changed)
    with pytest.raises(GraphError, match=words):
        text_to_prefix(run, "b", None)


def test_a_redacted_record_is_refused(tmp_path: Path) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    with team.rig.store() as store:
        spans = store.spans(team.parent.episode.episode_id)
    first_id = team.parent.actions[0].action_id
    message = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "my key is [redacted: key]"}]}])
    hidden = [
        replace(span, attributes=span.attributes | {OUTPUT_MESSAGES: message}) if span.span_id == first_id else span
        for span in spans
    ]
    with pytest.raises(GraphError, match=r"is redacted \(node a, call 1\)"):
        text_to_prefix(spans_to_parent(hidden), "b", None)
