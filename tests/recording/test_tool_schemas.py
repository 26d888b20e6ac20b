"""Owns: the frozen tool surface: what each node offered its model, compared between runs, rounds and variants.

- A surface is the union over a run's episodes, from trajectories as from the store; who did not act is not in it.
- What was added, removed or changed is named, node by node; of another graph the whole team's tools count.
- Runs from before tools were recorded one by one are compared as far as their hashes go.
- A difference is refused unless it is allowed, and training refuses one in stored episodes and in a fresh round.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.growth_rig import fill
from support.sample_spans import SampleTrace

from marft_bridge.common.errors import ConfigError
from marft_bridge.recording.tool_lineage import request_to_tools, tools_to_lineage, tools_to_single_lineage
from marft_bridge.recording.tool_schemas import (
    Surface,
    refuse_changed,
    runs_to_surfaces,
    store_to_surface,
    surface_differences,
    surface_to_hashes,
    trajectories_to_surface,
)
from trace_store.assemble import spans_to_trajectory
from trace_store.records import SpanRow, Trajectory
from trace_store.store import TraceStore

BASE = {"base": "0" * 64}


def schema(name: str, about: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": about}}


def lineage(**nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """As the recorder writes it, of nodes that offered these tools."""
    offered = {node: request_to_tools({"tools": list(tools)}) for node, tools in nodes.items()}
    return {**BASE, **tools_to_lineage(offered), **tools_to_single_lineage(offered)}


def trace(acted: Sequence[str], found: dict[str, str], name: str = "1", **root: Any) -> list[SpanRow]:
    """An episode in which these nodes made one call each."""
    sample = SampleTrace(name)
    for at, path in enumerate(acted):
        node = sample.node("|".join(f"{part}:1" for part in path.split("/")), 10 * at, 10 * at + 9, step=at)
        sample.call(f"call{at}", node, 10 * at + 1, 10 * at + 2)
    return sample.spans(LINEAGE=json.dumps(found), **root)


def episode(acted: Sequence[str], found: dict[str, str], run_id: str = "run") -> Trajectory:
    return spans_to_trajectory(trace(acted, found, RUN_ID=run_id))


def unnamed(found: dict[str, str]) -> dict[str, str]:
    """As it was recorded before tools had names of their own."""
    return {name: digest for name, digest in found.items() if not name.startswith("tool/")}


def surface(*episodes: Trajectory) -> Surface:
    return trajectories_to_surface(episodes)


def of(**nodes: Sequence[dict[str, Any]]) -> Surface:
    return surface(episode(list(nodes), lineage(**nodes)))


SEARCH, CALC, MAIL = schema("search"), schema("calc"), schema("mail")


def test_a_surface_is_the_union_over_a_runs_episodes() -> None:
    early = episode(["worker"], lineage(worker=[SEARCH]))
    late = episode(["worker"], lineage(worker=[SEARCH, CALC]))
    other = episode(["worker"], lineage(worker=[CALC]))
    assert surface_differences(surface(early, other), surface(late)) == []
    assert surface_differences(surface(early), surface(late)) == ["node 'worker' changed: added calc"]


def test_added_removed_and_changed_tools_are_named_by_node() -> None:
    one = of(planner=[SEARCH], worker=[SEARCH, CALC], writer=[])
    other = of(planner=[SEARCH], worker=[schema("search", "now with pictures"), MAIL], writer=[MAIL])
    assert surface_differences(one, other) == [
        "node 'worker' changed: added mail, removed calc, changed search",
        "node 'writer' changed: added mail",
    ]


def test_a_node_of_a_subgraph_is_not_taken_for_a_tool() -> None:
    found = surface(episode(["team", "team/worker"], lineage(**{"team": [SEARCH], "team/worker": [CALC]})))
    assert set(found["team"].tools) == {"search"}
    assert set(found["team/worker"].tools) == {"calc"}


def test_a_node_that_did_not_act_in_one_of_the_runs_is_not_compared() -> None:
    assert surface_differences(of(planner=[SEARCH], worker=[CALC]), of(planner=[SEARCH])) == []


def test_an_episode_without_a_lineage_says_nothing_of_tools() -> None:
    assert surface(episode(["worker"], {})) == {}
    assert surface_differences(surface(episode(["worker"], {})), of(worker=[CALC])) == []
    # One with a lineage, but no tools in it, had none.
    assert surface_differences(surface(episode(["worker"], BASE)), of(worker=[CALC])) == [
        "node 'worker' changed: added calc"
    ]


def test_runs_that_were_recorded_without_the_names_are_compared_by_hash() -> None:
    old = surface(episode(["worker"], unnamed(lineage(worker=[SEARCH]))))
    assert surface_differences(old, of(worker=[SEARCH])) == []
    assert surface_differences(old, of(worker=[CALC])) == [
        "node 'worker' changed: its tools are others, and their names were not recorded"
    ]


def test_of_another_graph_the_tools_of_the_whole_team_count() -> None:
    team, alone = of(planner=[SEARCH], worker=[CALC]), of(solo=[SEARCH, CALC])
    graphs = {"team": "app.py:team", "alone": "app.py:solo"}
    assert refuse_changed({"team": team, "alone": alone}, False, "switch", graphs) is False
    less = {"team": team, "alone": of(solo=[SEARCH])}
    with pytest.raises(ConfigError, match="tool surface of the whole team changed: removed calc"):
        refuse_changed(less, False, "switch", graphs)
    # A node of one name in both is another node there: tools that only moved are the same team's.
    moved = {"team": team, "alone": of(planner=[CALC], worker=[SEARCH])}
    assert refuse_changed(moved, False, "switch", graphs) is False
    with pytest.raises(ConfigError, match="node 'planner' changed"):
        refuse_changed(moved, False, "switch")


def test_a_difference_is_refused_in_one_line_unless_it_is_allowed() -> None:
    runs = {"run A": of(worker=[SEARCH, CALC]), "run B": of(worker=[SEARCH]), "run C": of(worker=[MAIL])}
    with pytest.raises(ConfigError) as caught:
        refuse_changed(runs, False, "train.allow_tool_change")
    assert str(caught.value) == (
        "tool surface of node 'worker' changed: removed calc (between run A and run B); "
        "set train.allow_tool_change = true to go on all the same"
    )
    assert refuse_changed(runs, True, "train.allow_tool_change") is True
    assert refuse_changed({"a": of(worker=[CALC]), "b": of(worker=[CALC])}, False, "x") is False
    assert refuse_changed({}, False, "x") is False


def test_episodes_are_told_apart_by_their_runs() -> None:
    found = runs_to_surfaces(
        [
            episode(["a"], lineage(a=[CALC]), "one"),
            episode(["a"], lineage(a=[MAIL]), "two"),
            episode(["a"], lineage(a=[MAIL]), "one"),
        ]
    )
    assert {run: set(nodes["a"].tools) for run, nodes in found.items()} == {
        "run one": {"calc", "mail"},
        "run two": {"mail"},
    }


def test_the_store_knows_the_surface_of_a_run_and_of_one_variant_of_it(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    fill(
        path,
        [
            trace(["worker"], lineage(worker=tools), name, VARIANT=variant)
            for name, variant, tools in (
                ("1", "before", [SEARCH, CALC]),
                ("2", "after", [SEARCH]),
                ("3", "after", [SEARCH, CALC]),
                ("4", "less", [SEARCH]),
            )
        ],
    )
    with TraceStore.open(path) as store:
        variants = {name: store_to_surface(store, "run", name) for name in ("before", "after", "less", "none")}
        assert store_to_surface(store, "run") == trajectories_to_surface(store.trajectories())
        assert variants["after"] == trajectories_to_surface(store.trajectories(variant="after"))
    hashes = {name: surface_to_hashes(found) for name, found in variants.items()}
    assert hashes["before"].keys() == {"worker"}
    assert len(hashes["before"]["worker"]) == 64
    assert hashes["before"] == hashes["after"] != hashes["less"]
    assert hashes["none"] == {}
    assert surface_differences(variants["before"], variants["after"]) == []
