"""Owns: a variant whose nodes have prompts of their own, in a comparison.

- Only that variant's calls of that node begin with the text, on adapters and on a hosted model; report, plan and
  episodes say so, and it is a contender like any other, with a cost.
- Two variants that differ in prompts alone are two; they are not mixed, and one with prompts is not promoted.
- A prompt that has nothing to replace ends the comparison in one line; one whose node makes no call is said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.compare_rig import PRICES, Lab, lab_in

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.views import describe_variant
from marft_bridge.promotion.candidate_check import check_candidate
from trace_store import conventions as names
from trace_store.store import TraceStore

BRIEFED = """

def briefed_speaker(model, name):
    async def speak(state: State) -> dict[str, Any]:
        messages = [("system", "as the app says"), ("user", f"{state['number']} " + "; ".join(state["log"]))]
        return {"log": [str((await model.ainvoke(messages)).text)]}

    return speak


def briefed(model: BaseChatModel = None):
    model = model or ChatOpenAI(model="hosted", base_url="HOSTED/v1", api_key="k", max_retries=0)
    graph = StateGraph(State)
    graph.add_node("reasoner", briefed_speaker(model, "reasoner"))
    graph.add_node("actor", briefed_speaker(model, "actor"))
    graph.add_edge(START, "reasoner")
    graph.add_edge("reasoner", "actor")
    graph.add_edge("actor", END)
    return graph.compile()
"""
TEXT = "Say yes where it is right.\nNothing else."


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """The actor is right on every third task, and on every task where it is told the text."""
    with lab_in(tmp_path) as opened:
        opened.apps.write_text(opened.apps.read_text() + BRIEFED.replace("HOSTED", opened.hosted.url))

        def answer(body: Mapping[str, Any]) -> str:
            number = int(str(body["messages"][-1]["content"]).split(" ")[0])
            return "yes" if number % 3 == 0 or body["messages"][0]["content"] == TEXT else "no"

        opened.ours.answer = opened.hosted.answer = answer
        yield opened


def briefed(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    """A variant of the briefed graph on adapters."""
    return {"name": name, "app": f"{lab.apps}:briefed", "nodes": ["reasoner", "actor"]} | changes


def hosted(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "app": f"{lab.apps}:briefed", "own_models": True} | changes


def first_messages(lab: Lab, variant: str) -> list[tuple[str, str]]:
    """Node and first recorded message of each call of a variant."""
    with TraceStore.open(lab.run / "store.duckdb") as store:
        store.take_in()
        trajectories = store.trajectories(run_ids=["compare-1"], variant=variant)
        spans = [span for t in trajectories for span in store.spans(t.episode.episode_id) if span.operation == "chat"]
    ordered = sorted(spans, key=lambda span: span.start_ns)
    prompts = [json.loads(span.attributes[names.INPUT_MESSAGES])[0]["parts"][0]["content"] for span in ordered]
    return [(str(span.attributes[names.NODE]), text) for span, text in zip(ordered, prompts, strict=True)]


def test_a_better_prompt_on_the_hosted_model_and_on_adapters_is_a_contender_with_its_cost(
    lab: Lab, tmp_path: Path
) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    prompts = {"actor": TEXT}
    report = lab.compare(
        hosted(lab, "hosted"),
        hosted(lab, "hosted, told", prompts=prompts),
        briefed(lab, "local, told", adapters={"actor": 2}, prompts=prompts),
        tasks=8,
        prices=str(tmp_path / "prices.toml"),
    )
    for name, text in (("hosted", "as the app says"), ("hosted, told", TEXT), ("local, told", TEXT)):
        assert set(first_messages(lab, name)) == {("reasoner", "as the app says"), ("actor", text)}, name
    assert [variant.prompts for variant in report.variants] == [{}, prompts, prompts]
    assert describe_variant(report.variants[1]).endswith("prompts of its own: actor")
    scores = {choice.team: choice.score.mean for choice in report.choices}
    assert scores["hosted, told"] == scores["local, told"] == 1.0 > scores["hosted"]
    assert [choice.team for choice in report.choices if choice.efficient] == ["local, told"]
    assert Report.model_validate_json((lab.run / "report.json").read_text()) == report
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    tags = {t.episode.variant: t.episode.tags for t in lab.stored()}
    assert tags == {"hosted": {}, "hosted, told": {"prompt:actor": digest}, "local, told": {"prompt:actor": digest}}
    (run,) = TraceStore.open(lab.run / "store.duckdb", read_only=True).runs()
    assert [variant.get("prompts") for variant in run.config["plan"]["variants"]] == [None, prompts, prompts]
    asked = [body for body in lab.ours.asked if body["model"] == "actor@2"]
    assert {body["messages"][0]["content"] for body in asked} == {TEXT}
    assert all(action.trainable for t in lab.stored() if t.episode.variant == "local, told" for action in t.actions)


def test_the_same_prompts_twice_are_refused_and_another_prompt_is_no_resume(lab: Lab) -> None:
    told = briefed(lab, "told", prompts={"actor": TEXT})
    with pytest.raises(ConfigError, match=r"'told' and 'again' would run the same thing .*prompts of actor"):
        lab.compare(told, {**told, "name": "again"})
    lab.compare(briefed(lab, "plain"), told, tasks=3)
    with pytest.raises(ConfigError, match="compare-1 began with"):
        lab.compare(briefed(lab, "plain"), {**told, "prompts": {"actor": "other"}}, tasks=3, resume=True)


@pytest.mark.slow
def test_teams_with_other_prompts_are_not_mixed_and_teams_with_the_same_are(lab: Lab) -> None:
    before, after = briefed(lab, "before"), briefed(lab, "after", adapters=2)
    told = {**after, "prompts": {"actor": TEXT}}
    with pytest.raises(ConfigError, match="cannot be mixed with 'before': they have other prompts"):
        lab.compare(before, told, mixed_teams="auto", mixed_candidate="after")
    prompts = {"prompts": {"actor": TEXT}}
    report = lab.compare(before | prompts, after | prompts, mixed_teams="auto", tasks=3)
    assert report.mixed is not None
    assert {text for node, text in first_messages(lab, "before+actor") if node == "actor"} == {TEXT}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"nobody": TEXT}, r"'told': prompts: 'nobody' is not in graph.nodes or graph.frozen: reasoner, actor"),
        ({"actor": " "}, r"'told': prompts.actor is empty"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_before_anything_runs(
    prompts: dict[str, str], message: str, lab: Lab
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        lab.compare({"name": "before"}, {"name": "told", "prompts": prompts})
    assert not lab.ours.asked


def test_a_call_without_a_system_message_ends_the_comparison_in_one_line(lab: Lab) -> None:
    message = r"^variant 'told': prompts: a call of node 'actor' begins with no system message"
    with pytest.raises(GraphError, match=message) as raised:
        lab.compare({"name": "before"}, {"name": "told", "prompts": {"actor": TEXT}}, in_flight=1)
    assert "\n" not in str(raised.value)
    assert len(lab.ours.asked) <= 3  # base's two calls, and the reasoner's


def test_a_prompt_of_a_node_that_makes_no_call_is_said(lab: Lab) -> None:
    lab.compare(briefed(lab, "plain"), briefed(lab, "told", prompts={"acter": TEXT}), tasks=3)
    assert "told: node 'acter' made no call in 3 episodes whose system message its prompt could replace" in lab.said


@pytest.mark.slow
def test_a_variant_with_prompts_is_not_promoted(lab: Lab) -> None:
    told = {"prompts": {"actor": TEXT}}
    lab.apps.write_text(lab.apps.read_text().replace("def duo(", "def unused_duo(").replace("def briefed(", "def duo("))
    report = lab.compare({"name": "before"}, {"name": "told", "adapters": 2} | told, tasks=40)
    with pytest.raises(ConfigError, match=r"'told' has prompts of its own \(actor\)"):
        check_candidate(lab.config(tasks=40), report, "correct>0", "told", Reporter())
