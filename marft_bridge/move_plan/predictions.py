"""What a plan says of its nodes -> rows of the store; and those rows against what happened later: a calibration.

What can have happened: `train` imitated, and its held-out calls were measured (the metrics of an adapter's version);
`compare` ran the hosted app beside variants in which one node alone is local (report.json of its run folder).
Invariant: only what is younger than a prediction is held against it, and of several the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.records import Report
from marft_bridge.move_plan.proposal import NodeFacts, Proposed
from marft_bridge.statistics.means import MeanInterval
from marft_bridge.statistics.ranks import rank_correlation
from trace_store.records import AdapterRow, Prediction

PLACE = "place"
NATS, NATS_BASE, GAIN = "nats_per_token", "nats_per_token_base", "gain"
_METRICS = {NATS: "held_out_nats", NATS_BASE: "held_out_nats_before"}  # of an adapter's version
_LEAST_NODES = 3  # of two, every order agrees or does not


@dataclass(frozen=True, slots=True)
class Calibrated:
    """One prediction, and what happened; None where nothing has yet."""

    plan: str
    node: str
    quantity: str
    predicted: float
    low: float | None
    high: float | None
    happened: float | None
    source: str | None  # where that was measured

    @property
    def is_within(self) -> bool | None:
        """Whether it lies in the predicted interval; None without one, or before anything happened."""
        if self.happened is None or self.low is None or self.high is None:
            return None
        return self.low <= self.happened <= self.high


@dataclass(frozen=True, slots=True)
class OrderAgreement:
    """The order that a plan proposed, against what moving each node alone was measured to cost."""

    plan: str
    nodes: int
    correlation: float | None  # Spearman's, of place and loss; None for fewer than three nodes, or if all lose alike


def plan_to_predictions(
    plan: str, facts: Sequence[NodeFacts], proposal: Sequence[Proposed], now_ns: int
) -> list[Prediction]:
    """The rows to keep."""
    rows = [
        Prediction(plan, p.node, PLACE, value=float(p.place), low=None, high=None, created_ns=now_ns)
        for p in proposal
        if p.place is not None
    ]
    for fact in facts:
        probe = None if fact.fit is None else fact.fit.probe
        if probe is not None:
            intervals: dict[str, MeanInterval] = {NATS: probe.after, NATS_BASE: probe.before, GAIN: probe.gain}
            rows += [
                Prediction(
                    plan,
                    fact.usage.node,
                    quantity,
                    value=interval.mean,
                    low=interval.low,
                    high=interval.high,
                    created_ns=now_ns,
                )
                for quantity, interval in intervals.items()
            ]
    return rows


def calibrate(
    predictions: Sequence[Prediction], adapters: Sequence[AdapterRow], report_path: Path
) -> tuple[list[Calibrated], list[OrderAgreement]]:
    """Every prediction with what happened, and how well each plan's order agreed.

    Args:
        adapters: the versions that were trained.
        report_path: where `compare` writes its report.json, whether it did or not.

    Raises:
        ConfigError: that report cannot be read.
    """
    learned = _adapters_to_learned(adapters)
    report = _read_report(report_path)
    losses = {} if report is None else report_to_losses(report)
    reported_ns = 0 if report is None else int(report.created.timestamp() * 1e9)
    rows: list[Calibrated] = []
    places: dict[str, list[tuple[float, float]]] = {}
    for prediction in predictions:
        happened, source = None, None
        if prediction.quantity in (*_METRICS, GAIN):
            happened, source = _first_after(learned.get((prediction.node, prediction.quantity), ()), prediction)
        elif prediction.quantity == PLACE and reported_ns > prediction.created_ns and prediction.node in losses:
            happened, source = losses[prediction.node], "report.json: loss by moving it alone"
            places.setdefault(prediction.run_id, []).append((prediction.value, happened))
        rows.append(
            Calibrated(
                prediction.run_id,
                prediction.node,
                prediction.quantity,
                predicted=prediction.value,
                low=prediction.low,
                high=prediction.high,
                happened=happened,
                source=source,
            )
        )
    return rows, [
        OrderAgreement(
            plan,
            len(pairs),
            rank_correlation(*zip(*pairs, strict=True)) if len(pairs) >= _LEAST_NODES else None,
        )
        for plan, pairs in places.items()
    ]


def _first_after(
    measured: Sequence[tuple[int, float, str]], prediction: Prediction
) -> tuple[float, str] | tuple[None, None]:
    later = [(value, source) for created_ns, value, source in measured if created_ns > prediction.created_ns]
    return later[0] if later else (None, None)


def _adapters_to_learned(adapters: Sequence[AdapterRow]) -> Mapping[tuple[str, str], list[tuple[int, float, str]]]:
    """(node, quantity) -> when it was measured in training, the value, and by which version; the oldest first."""
    learned: dict[tuple[str, str], list[tuple[int, float, str]]] = {}
    for adapter in sorted(adapters, key=lambda row: row.created_ns):
        recorded = {quantity: adapter.metrics.get(metric) for quantity, metric in _METRICS.items()}
        values = {quantity: value for quantity, value in recorded.items() if isinstance(value, float)}
        if values.keys() == _METRICS.keys():
            values[GAIN] = values[NATS_BASE] - values[NATS]
        source = f"training of {adapter.node}@{adapter.version}"
        for quantity, value in values.items():
            learned.setdefault((adapter.node, quantity), []).append((adapter.created_ns, value, source))
    return learned


def _read_report(path: Path) -> Report | None:
    if not path.is_file():
        return None
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        raise ConfigError(
            f"plan --calibration: {path} is no report of this version; `marft-bridge compare` writes it anew"
        ) from None


def report_to_losses(report: Report) -> dict[str, float]:
    """Node -> what the score loses when it alone is moved from its hosted model to a trained adapter.

    Empty unless the base is the app on its own models. Of several variants that move the same node the first counts.
    """
    base = report.variants[0]
    losses: dict[str, float] = {}
    for variant in report.candidates:
        moved = set(base.hosted) - set(variant.hosted)
        contrast = report.contrast(variant.name)
        is_alone = len(moved) == 1 and moved == {node for node, version in variant.adapters.items() if version}
        is_same_app = variant.model is None and variant.graph is None and variant.max_tokens is None
        if is_alone and is_same_app and variant.prompts == base.prompts and contrast is not None:
            losses.setdefault(moved.pop(), 0.0 - contrast.diff)  # -diff would make a loss of -0.0
    return losses
