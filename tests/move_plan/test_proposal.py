"""Owns: the rule of the proposal, class by class, and the order within a class; what is kept of it; the calibration."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.sample_report import full_report

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.records import Report
from marft_bridge.move_plan.answers import NodeAnswers
from marft_bridge.move_plan.predictions import calibrate, plan_to_predictions, report_to_losses
from marft_bridge.move_plan.probe_figures import NodeFit, Probe
from marft_bridge.move_plan.proposal import LIKELY_NATS, MIN_CALLS, NodeFacts, propose
from marft_bridge.move_plan.reward_links import NodeLinks
from marft_bridge.move_plan.usage import ModelUsage, NodeUsage
from marft_bridge.statistics.means import MeanInterval
from trace_store.records import AdapterRow, Prediction
from trace_store.store import TraceStore


def sure(value: float, width: float = 0.1) -> MeanInterval:
    return MeanInterval(value, value - width, value + width)


def facts(node: str, *, after: float | None = None, before: float = 3.0, **known: Any) -> NodeFacts:
    """A node; `after`: nats a token after the probe. Without it no model was asked."""
    calls, local_calls = known.get("calls", 100), known.get("local_calls", 0)
    models = (ModelUsage("m", calls, "EUR", known["cost"], calls),) if "cost" in known else ()
    usage = NodeUsage(node, calls, local_calls, calls, 1.0, 2.0, known.get("tokens", 1000), 0, 0, models)
    fit = None
    if after is not None:
        probe = Probe(32, 16, 12, sure(before), sure(after), sure(before - after, known.get("width", 0.1)))
        fit = NodeFit(node, 48, 48 * known.get("answer", 10), sure(before), 0.5, {}, probe)
    reach, credit = known.get("reach"), known.get("credit")
    links = NodeLinks(
        node, 10, None if reach is None else sure(reach), reach, None, None, None if credit is None else sure(credit)
    )
    answers = NodeAnswers(
        node, calls, calls, known.get("numbers", 0), 0, known.get("different", 90), 2, 9.0, 9.0, 2.0, 3.0
    )
    return NodeFacts(usage, answers, links, fit)


def order(*nodes: NodeFacts) -> list[tuple[str, str, int | None]]:
    return [(proposed.node, proposed.move, proposed.place) for proposed in propose(nodes)]


def test_every_class_of_the_rule_and_their_order() -> None:
    assert order(
        facts("local", local_calls=100),
        facts("no help", before=2.0, after=1.95),
        facts("helped", after=1.0),
        facts("likely", after=LIKELY_NATS),
        facts("few", after=0.1, calls=MIN_CALLS - 1),
        facts("enough", after=0.1, calls=MIN_CALLS),
    ) == [
        ("enough", "first", 1),
        ("likely", "first", 2),
        ("helped", "next", 3),
        ("few", "unknown", 4),
        ("no help", "leave", 5),
        ("local", "local", None),
    ]
    assert math.isclose(math.exp(-LIKELY_NATS), 0.5)


def test_without_a_model_the_form_of_the_answers_decides_and_says_so() -> None:
    choice, *rest = propose([facts("a"), facts("b", numbers=100), facts("c", different=12)])
    assert (choice.node, choice.move) == ("c", "first")
    assert choice.reasons == ("its answers are a choice; no local model was asked",)
    assert [(row.node, row.move, row.reasons[0].split(";")[0]) for row in rest] == [
        ("a", "unknown", "its answers are text"),
        ("b", "unknown", "its answers are numbers"),
    ]


def test_within_a_class_the_risk_decides_which_is_nats_of_an_answer_times_what_hangs_on_it() -> None:
    """Ten tokens each."""
    assert order(facts("a", after=0.4), facts("b", after=0.3)) == [("b", "first", 1), ("a", "first", 2)]
    by_reach = propose([facts("a", after=0.4, reach=0.5), facts("b", after=0.3, reach=1.0)])
    assert [(p.node, p.risk) for p in by_reach] == [("a", pytest.approx(2.0)), ("b", pytest.approx(3.0))]
    assert by_reach[0].reasons[-1] == "reach 0.50"
    credited = {"a": {"reach": 0.5, "credit": 0.9}, "b": {"reach": 1.0, "credit": -0.1}}
    by_credit = propose([facts(node, after=0.4, **known) for node, known in credited.items()])
    assert [(p.node, p.risk) for p in by_credit] == [("b", 0.0), ("a", pytest.approx(3.6))]
    half_known = propose([facts("a", after=0.4, reach=0.1), facts("b", after=0.3)])
    assert [p.node for p in half_known] == ["b", "a"], "what one of them lacks is not used for the other"


def test_of_answers_with_tokens_as_likely_the_shorter_ones_go_first() -> None:
    assert order(facts("a", after=0.3, answer=20), facts("b", after=0.5, answer=4)) == [
        ("b", "first", 1),
        ("a", "first", 2),
    ]


def test_of_equal_risks_what_costs_more_goes_first_then_what_has_more_tokens() -> None:
    assert [n for n, *_ in order(facts("a", after=0.3, cost=1.0), facts("b", after=0.3, cost=2.0))] == ["b", "a"]
    assert [n for n, *_ in order(facts("a", after=0.3), facts("b", after=0.3, tokens=2000))] == ["b", "a"]
    assert [n for n, *_ in order(facts("b", after=0.3), facts("a", after=0.3))] == ["a", "b"]


# -- what is kept, and what happened -------------------------------------------------------------------------------


def kept(nodes: list[NodeFacts], now_ns: int) -> list[Prediction]:
    return plan_to_predictions("plan-1", nodes, propose(nodes), now_ns)


def test_places_and_likelihoods_are_kept_with_their_intervals() -> None:
    rows = kept([facts("a", after=0.5, before=2.0), facts("b"), facts("c", local_calls=100)], 7)
    assert [(row.node, row.quantity, row.value, row.low, row.high) for row in rows] == [
        ("a", "place", 1.0, None, None),
        ("b", "place", 2.0, None, None),
        ("a", "nats_per_token", 0.5, 0.4, 0.6),
        ("a", "nats_per_token_base", 2.0, 1.9, 2.1),
        ("a", "gain", 1.5, 1.4, 1.6),
    ]
    assert {row.created_ns for row in rows} == {7}


def adapter(version: int, created_ns: int, nats: float) -> AdapterRow:
    metrics = {"held_out_nats": nats, "held_out_nats_before": 2.05}
    return AdapterRow("a", version, version - 1, "p", f"{version}" * 64, "b" * 64, created_ns, metrics)


def test_a_prediction_is_held_against_the_first_measurement_that_is_younger(tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        store.put_predictions(kept([facts("a", after=0.5, before=2.0), facts("b")], 100))
        assert {row.happened for row in calibrate(store.predictions(), [], tmp_path / "report.json")[0]} == {None}
        for row in (adapter(3, 300, 0.1), adapter(2, 200, 0.9), adapter(1, 50, 0.5)):
            store.put_adapter(row)
        rows, orders = calibrate(store.predictions(), store.adapters(), tmp_path / "report.json")
    assert orders == []
    happened = {(row.node, row.quantity): (row.happened, row.is_within, row.source) for row in rows}
    assert happened["a", "nats_per_token"] == (0.9, False, "training of a@2")
    assert happened["a", "nats_per_token_base"] == (2.05, True, "training of a@2")
    assert happened["a", "gain"] == (pytest.approx(2.05 - 0.9), False, "training of a@2")
    assert happened["b", "place"] == (None, None, None)


def hosted_report(losses: dict[str, float], **of_base: Any) -> Report:
    """The app on its own models beside variants in which one node each is local, and one in which all are."""
    report = full_report()
    nodes = tuple(losses)
    hosted = report.variants[0].model_copy(
        update={"name": "hosted", "model": "its own models", "adapters": {}, "hosted": nodes, **of_base}
    )
    local = hosted.model_copy(
        update={"name": "local", "model": None, "hosted": (), "adapters": dict.fromkeys(nodes, 1)}
    )
    alone = [
        local.model_copy(
            update={"name": f"{n} alone", "adapters": {n: 1}, "hosted": tuple(other for other in nodes if other != n)}
        )
        for n in nodes
    ]
    untrained = alone[0].model_copy(update={"name": "untrained", "adapters": {nodes[0]: 0}})
    told = alone[1].model_copy(update={"name": "told how", "prompts": {nodes[0]: "Do it well."}})
    limited = alone[1].model_copy(update={"name": "limited", "max_tokens": 9})
    variants = (hosted, untrained, told, limited, *alone, local)
    diffs = {f"{node} alone": -loss for node, loss in losses.items()}
    row = report.contrasts[0]
    contrasts = tuple(
        row.model_copy(update={"variant": v.name, "diff": diff, "mean_b": row.mean_a + diff})
        for v in variants[1:]
        for diff in [diffs.get(v.name, 0.9)]
    )
    kept = {"variants": variants, "contrasts": contrasts, "setup": report.setup, "created": report.created}
    return Report(metric=report.metric, base="hosted", **kept)


def test_what_moving_a_node_alone_loses_needs_the_hosted_app_as_the_base() -> None:
    losses = {"a": 0.3, "b": 0.0, "c": -0.1}
    report = hosted_report(losses)
    assert report_to_losses(report) == losses
    level = [row.model_copy(update={"diff": 0.0}) for row in report.contrasts]
    assert [f"{loss:g}" for loss in report_to_losses(report.model_copy(update={"contrasts": level})).values()] == [
        "0"
    ] * 3
    assert report_to_losses(hosted_report(losses, hosted=(), model=None)) == {}  # a base that is served here
    assert report_to_losses(full_report()) == {}


def test_places_are_held_against_what_moving_each_node_alone_lost(tmp_path: Path) -> None:
    report = hosted_report({"worst": 0.3, "harmless": 0.0, "middling": 0.1})
    after_ns = int((report.created + datetime.timedelta(days=1)).timestamp() * 1e9)
    (tmp_path / "report.json").write_text(report.model_dump_json())
    places = {"harmless": 1.0, "middling": 2.0, "worst": 3.0, "unmeasured": 4.0}

    def predictions(plan: str, values: dict[str, float], created_ns: int) -> list[Prediction]:
        return [Prediction(plan, node, "place", place, None, None, created_ns) for node, place in values.items()]

    rows, orders = calibrate(
        [
            *predictions("plan-1", places, 1),
            *predictions("plan-2", places | {"middling": 3.0, "worst": 2.0}, 2),
            *predictions("plan-3", {"worst": 1.0, "middling": 2.0}, 3),
            *predictions("plan-4", places, after_ns),
        ],
        [],
        tmp_path / "report.json",
    )
    # of plan-2 the ranks 1, 3, 2 stand against 1, 2, 3: 1 - 6 * 2 / (3 * 8)
    assert [(o.plan, o.nodes, o.correlation and round(o.correlation, 9)) for o in orders] == [
        ("plan-1", 3, 1.0),
        ("plan-2", 3, 0.5),
        ("plan-3", 2, None),
    ]
    assert {row.node: row.happened for row in rows if row.plan == "plan-1"} == {
        "harmless": 0.0,
        "middling": 0.1,
        "worst": 0.3,
        "unmeasured": None,
    }
    assert {row.happened for row in rows if row.plan == "plan-4"} == {None}
    (tmp_path / "report.json").write_text(json.dumps({"schema_version": 1}))
    with pytest.raises(ConfigError, match="no report of this version"):
        calibrate([], [], tmp_path / "report.json")
