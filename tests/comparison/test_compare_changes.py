"""Owns: the tasks that changed most are shown with what really happened in them.

- Every call and every tool run is a step, in order, with the texts that were recorded; long ones are cut and say so.
- At most five tasks each way, by their mean over samples; the run shown is the one that changed most.
- A cohort in which a candidate lost shows the two tasks that lost most there.
- A node that another graph declares frozen runs at version 0 and is shown like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.compare_rig import Lab, lab_in

from marft_bridge.common.progress import Reporter
from marft_bridge.comparison import views, wording
from marft_bridge.comparison.changes import MAX_STEP_TEXT_LENGTH
from marft_bridge.comparison.command import compare
from marft_bridge.comparison.table import _notes

AGENT = """

def agent(model: BaseChatModel):
    from langchain.agents import create_agent
    from langchain_core.messages import HumanMessage

    def look_up(word: str) -> str:
        '''Looks a word up.'''
        if word == "lost":
            raise ValueError("no such word")
        return f"0 is what {word} means"

    team = create_agent(model, [look_up])

    async def ask(state: State) -> dict[str, Any]:
        found = await team.ainvoke({"messages": [HumanMessage(f"{state['number']} ?")]})
        return {"log": [str(found["messages"][-1].text)]}

    graph = StateGraph(State)
    graph.add_node("agent", ask)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile()
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as found:
        yield found


def test_tool_runs_are_steps_between_the_calls(lab: Lab) -> None:
    lab.apps.write_text(lab.apps.read_text() + AGENT)
    lab.ours.auto_tools = True
    asked: Counter[int] = Counter()

    def answer(body: dict[str, object]) -> object:
        if body["model"] != "agent.2Fmodel@0":
            return "no"
        asked[int(str(body["seed"]))] += 1
        last = body["messages"][-1]  # type: ignore[index]
        return "yes" if last["role"] == "tool" else [("look_up", {"word": "owl"})]

    lab.ours.answer = answer  # type: ignore[assignment]
    tooled = {"name": "agent", "app": f"{lab.apps}:agent", "nodes": ["agent/model"]}
    report = lab.compare({"name": "before"}, tooled, tasks=7, allow_tool_change=True)
    (changed,) = report.tasks
    assert (len(changed.improved), changed.regressed) == (5, ())  # of seven that all improved
    assert [c.task_id for c in changed.improved] == sorted(c.task_id for c in changed.improved)  # ties by their ids
    steps = changed.improved[0].b.steps
    assert [(step.kind, step.node, step.text) for step in steps] == [
        ("call", "agent/model", 'look_up({"word": "owl"})'),
        ("tool", "look_up", '{"word": "owl"}\n0 is what owl means'),
        ("call", "agent/model", "yes"),
    ]
    assert [step.adapter for step in steps] == ["agent.2Fmodel@0", None, "agent.2Fmodel@0"]
    assert steps[1].tokens is None
    assert set(asked.values()) == {1}  # every call of an episode has a seed of its own


@pytest.mark.slow
def test_a_task_counts_by_its_mean_and_shows_the_run_that_changed_most(lab: Lab) -> None:
    calls: Counter[tuple[str, int]] = Counter()

    def answer(model: str, number: int) -> str:
        calls[model, number] += 1
        return "yes" if model == "actor@2" and calls[model, number] == 2 else "no"  # the second sample only

    lab.answer = answer
    report = lab.compare(tasks=2, samples_per_task=3, in_flight=1)
    (changed,) = report.tasks
    assert len(changed.improved) == 2
    for change in changed.improved:
        assert change.reward_a == 0.0
        assert change.reward_b == pytest.approx(1 / 3)
        assert (change.a.reward, change.b.reward) == (0.0, 1.0)
        by_id = {t.episode.episode_id: t.episode for t in lab.stored()}
        assert by_id[change.a.episode_id].sample == by_id[change.b.episode_id].sample == 1


@pytest.mark.slow
def test_a_long_text_is_cut_and_says_so(lab: Lab) -> None:
    long = "word " * 4_000
    lab.ours.answer = lambda body: long if body["model"] == "reasoner@2" else "yes" if "@2" in body["model"] else "no"
    config = lab.config(tasks=3)
    sampling = config.sampling.model_copy(update={"max_tokens": 30_000})
    report = compare(config.model_copy(update={"sampling": sampling}), Reporter(), resume=False)
    step = report.tasks[0].improved[0].b.steps[0]
    assert step.text == f"{long[:MAX_STEP_TEXT_LENGTH]} [{len(long) - MAX_STEP_TEXT_LENGTH} more characters]"
    assert step.tokens == len(long) + 1


def test_a_cohort_that_lost_shows_the_tasks_that_lost_most_there(lab: Lab) -> None:
    """The candidate fails on odd numbers, which are a topic of their own, and wins on even ones."""
    lab.answer = lambda model, number: "yes" if (number % 2 == 0) == (model == "actor@2") else "no"
    report = lab.compare(tasks=20, cohorts=["topic"])
    cohorts = {cohort.value: cohort for cohort in report.cohorts}
    assert cohorts["even"].regressed == {}
    (shown,) = cohorts["odd"].regressed.values()
    assert list(cohorts["odd"].regressed) == ["after"]
    assert len(shown) == 2
    of_task = {t.episode.episode_id: t.episode.task for t in lab.stored()}
    for change in shown:
        assert (change.reward_a, change.reward_b, change.b.reward) == (1.0, 0.0, 0.0)
        assert of_task[change.b.episode_id]["topic"] == "odd"
        assert [step.node for step in change.b.steps] == ["reasoner", "actor"]
    (view,) = views.cohort_views(report)
    assert {row.label: row.value for row in view.forest.rows} == {"even": "+1.000", "odd": "−1.000"}
    said = wording.cohort_loss(cohorts["odd"], "after")
    assert said.startswith("after in topic odd: −1")
    markdown, page = ((lab.run / name).read_text() for name in ("report.md", "report.html"))
    assert "## Cohorts" in markdown
    assert "<h2>Cohorts</h2>" in page
    assert "## `after` in `topic` `odd`: −1" in markdown
    assert all(f"episode <code>{change.b.episode_id}" in page for change in shown)
    assert f"worse: {said}" in "\n".join(_notes(report))


def test_nothing_changed_shows_nothing(lab: Lab) -> None:
    lab.answer = lambda *_: "no"
    assert lab.compare(tasks=3).tasks == ()


def test_a_frozen_node_of_another_graph_runs_at_version_0(lab: Lab) -> None:
    half = {"name": "half", "app": f"{lab.apps}:duo", "nodes": ["reasoner"], "frozen": ["actor"], "adapters": 2}
    report = lab.compare({"name": "before"}, half, tasks=4)
    assert {body["model"] for body in lab.ours.asked} == {"reasoner@0", "actor@0", "reasoner@2"}
    assert report.variants[1].adapters == {"reasoner": 2}
    actions = [a for t in lab.stored() if t.episode.variant == "half" for a in t.actions if a.node == "actor"]
    assert {(a.adapter, a.trainable) for a in actions} == {("actor@0", False)}
