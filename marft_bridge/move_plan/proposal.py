"""What is known of each node -> which to move first, which next, which to leave, and why.

The rule, whole (`RULE` says it to the user):

    local     every call of it is answered by an adapter already
    unknown   fewer than MIN_CALLS hosted calls, or nothing below can be told
    first     held-out answers at ln 2 nats a token or less after the probe: a token is likelier than not, in the
              geometric mean. Without a model: few different answers, each given often
    next      above ln 2, and the probe is shown to help
    leave     above ln 2, and the probe is not shown to help

Within a class the order is by risk, least first: nats an answer (1 without a model) times how much hangs on it: what
`credit` measured where it did for every node in question, else the reach where that is known of every one, else 1. An
answer is right where all of its tokens are, so that a long one is harder to take over than a short one of tokens as
likely. Equal risks: what costs more goes first, then what has more tokens. Invariant: nothing else has a say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from marft_bridge.move_plan.answers import NodeAnswers
from marft_bridge.move_plan.probe_figures import NodeFit
from marft_bridge.move_plan.reward_links import NodeLinks
from marft_bridge.move_plan.usage import NodeUsage

LIKELY_NATS = math.log(2)
MIN_CALLS = 20

Move = Literal["first", "next", "unknown", "leave", "local"]
_ORDER: tuple[Move, ...] = ("first", "next", "unknown", "leave", "local")

RULE = (
    f"first: held-out answers at {LIKELY_NATS:.2f} nats a token or less after the probe, so that a token is likelier "
    "than not; next: above that, and the probe is shown to help; leave: above that, and it is not; unknown: fewer "
    f"than {MIN_CALLS} hosted calls, or no figure. Without a model, a choice of few answers is first. In a "
    "class the lowest risk goes first: nats an answer, all of its tokens, times what hangs on it (credit where all "
    "nodes have it, else reach along D, else 1)"
)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """All that a plan knows of one node; None where it was not looked at, or there is nothing to look at."""

    usage: NodeUsage
    answers: NodeAnswers | None
    links: NodeLinks
    fit: NodeFit | None

    @property
    def nats(self) -> float | None:
        """Nats a token of held-out answers after the probe; of all scored answers by the base without one."""
        if self.fit is None or self.fit.base is None:
            return None
        return self.fit.base.mean if self.fit.probe is None else self.fit.probe.after.mean

    @property
    def nats_of_answer(self) -> float | None:
        """`nats` times the mean tokens of a scored answer."""
        return None if self.nats is None or self.fit is None else self.nats * self.fit.tokens / self.fit.calls


@dataclass(frozen=True, slots=True)
class Proposed:
    """What is proposed for one node. `place`: 1 is to be moved first; None for one that is local already."""

    node: str
    move: Move
    place: int | None
    risk: float | None
    reasons: tuple[str, ...]


def propose(facts: Sequence[NodeFacts]) -> list[Proposed]:
    """Every node, in the order in which to move them; those that are local already at the end."""
    judged = [(fact, *_judge(fact)) for fact in facts]
    basis, weights = _weights([fact for fact, move, _ in judged if move != "local"])
    rows = []
    for fact, move, reasons in judged:
        node = fact.usage.node
        risk = (
            None if move == "local" else (1.0 if fact.nats_of_answer is None else fact.nats_of_answer) * weights[node]
        )
        weight_text = () if move == "local" or basis == "weight" else (f"{basis} {weights[node]:.2f}",)
        rows.append((fact, Proposed(node, move, place=None, risk=risk, reasons=(*reasons, *weight_text))))
    rows.sort(key=lambda row: _sort_key(*row))
    places: dict[str, int] = {}
    for _, proposed in rows:
        if proposed.move != "local":
            places[proposed.node] = len(places) + 1
    return [replace(proposed, place=places.get(proposed.node)) for _, proposed in rows]


def _sort_key(fact: NodeFacts, proposed: Proposed) -> tuple[object, ...]:
    cost = sum(fact.usage.costs.values()) if len(fact.usage.costs) == 1 else 0.0
    return (_ORDER.index(proposed.move), proposed.risk or 0.0, -cost, -fact.usage.tokens, proposed.node)


def _judge(fact: NodeFacts) -> tuple[Move, tuple[str, ...]]:
    """The class of one node, and what decided it."""
    hosted_calls = fact.usage.calls - fact.usage.local_calls
    if hosted_calls == 0:
        return "local", ("adapters of ours answer all of its calls",)
    if hosted_calls < MIN_CALLS:
        return "unknown", (f"{hosted_calls} hosted calls are too few to say anything",)
    if fact.fit is None or fact.fit.base is None:
        return _judge_by_form(fact)
    if fact.fit.probe is None:
        reason = f"{fact.fit.base.mean:.2f} nats a token by the base, not probed: {fact.fit.no_probe}"
        return ("first" if fact.fit.base.mean <= LIKELY_NATS else "unknown"), (reason,)
    probe = fact.fit.probe
    change = f"held-out answers went from {probe.before.mean:.2f} to {probe.after.mean:.2f} nats a token"
    if probe.after.mean <= LIKELY_NATS:
        return "first", (change,)
    shown = "the probe is shown to help" if probe.helps else "the probe is not shown to help"
    return ("next" if probe.helps else "leave"), (f"{change}; {shown}",)


def _judge_by_form(fact: NodeFacts) -> tuple[Move, tuple[str, ...]]:
    missing = "no local model was asked" if fact.fit is None else str(fact.fit.no_probe)
    form = None if fact.answers is None else fact.answers.form
    if form == "a choice":
        return "first", (f"its answers are {form}; {missing}",)
    return "unknown", (f"its answers are {form or 'not recorded'}; {missing}",)


def _weights(facts: Sequence[NodeFacts]) -> tuple[str, Mapping[str, float]]:
    """How much hangs on each node's answers, by what all of them have, and the name of that."""
    measured = {f.usage.node: f.links.credit.mean for f in facts if f.links.credit is not None}
    reaches = {f.usage.node: f.links.reach.mean for f in facts if f.links.reach is not None}
    if facts and len(measured) == len(facts):
        return "credit", {node: max(0.0, value) for node, value in measured.items()}
    if facts and len(reaches) == len(facts):
        return "reach", reaches
    return "weight", {f.usage.node: 1.0 for f in facts}
