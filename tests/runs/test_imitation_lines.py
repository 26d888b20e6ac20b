"""Owns: what `train`, `status` and `view` say of the offline phase, per node, from its line in metrics.jsonl."""

from __future__ import annotations

from typing import Any

from marft_bridge.runs.imitation_lines import updates_to_imitation_lines

AGENT: dict[str, Any] = {
    "actions": 30,
    "drops": {"not re-tokenised: the answer is empty": 2, "episode below offline.threshold": 8},
    "epochs": 3,
    "stopped_by": "kl",
    "held_out_actions": 4,
    "held_out_nats_before": 2.05,
    "held_out_nats": 0.4126,
    "held_out_exact_before": 0.0,
    "held_out_exact": 0.75,
}


def lines(mode: str = "filtered", **changes: Any) -> list[str]:
    offline = {"phase": "offline", "round": 0, "replay": {"mode": mode, "agents": {"actor": AGENT | changes}}}
    return updates_to_imitation_lines([offline, {"phase": "online", "round": 1}])


def test_all_stored_calls_of_a_node_are_said_with_what_became_of_them() -> None:
    assert lines() == [
        "offline, actor: learned from 30 of 40 stored calls; 3 passes, stopped by kl",
        "offline, actor: 4 held-out calls, before and after: 2.050 and 0.413 nats a token; "
        "0% and 75% answered word for word",
        "offline, actor: not 8: episode below offline.threshold",
        "offline, actor: not 2: not re-tokenised: the answer is empty",
    ]


def test_what_was_not_measured_is_not_said() -> None:
    absent = dict.fromkeys(name for name in AGENT if name.startswith("held_out_"))
    assert lines(drops={}, stopped_by=None, **absent | {"held_out_actions": 0}) == [
        "offline, actor: learned from 30 of 30 stored calls; 3 passes"
    ]
    assert (
        lines(actions=0, drops={"episode failed": 5}, **absent)[0] == "offline, actor: learned from 0 of 5 stored calls"
    )


def test_what_was_taken_back_is_not_said_to_be_learned() -> None:
    assert lines(epochs=0, stopped_by="held-out likelihood")[0] == (
        "offline, actor: tried 30 of 40 stored calls; nothing kept, stopped by held-out likelihood"
    )
    assert lines(epochs=0, stopped_by=None)[0] == "offline, actor: learned from 30 of 40 stored calls; 0 passes"


def test_nothing_is_said_where_the_phase_was_off_or_has_not_ended() -> None:
    assert lines(mode="off") == []
    assert updates_to_imitation_lines([{"phase": "forecast", "round": 0, "lines": []}]) == []


def test_a_line_of_an_earlier_release_is_read() -> None:
    old = {name: AGENT[name] for name in ("actions", "epochs", "stopped_by")}
    line = {"phase": "offline", "round": 0, "replay": {"mode": "awr", "agents": {"actor": old}}}
    assert updates_to_imitation_lines([line]) == [
        "offline, actor: learned from 30 stored calls; 3 passes, stopped by kl"
    ]
