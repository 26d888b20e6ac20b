"""Owns: what `traces` says of forks: which call of which episode they leave, and what that call was worth.

The parent is x by a, then y and z by b, with reward 0; forks leave it at z, the second call of b.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from support.fork_store import PARENT, deeper_fork, fork_records, forked_store, named
from support.growth_rig import fill
from support.traces_rig import terminal, traces, written

from marft_bridge.traces.forks import ForkedCall, ForkOrigin, episode_to_forks, episode_to_origin
from marft_bridge.traces.listing import Filters, list_episodes
from trace_store.store import TraceStore

HOSTILE, VISIBLE = "\x1b[2J[bold]x", r"\x1b[2J[bold]x"


def forks_in(path: Path) -> list[ForkedCall]:
    with TraceStore.open(path) as store:
        trajectory = store.trajectory(PARENT)
        assert trajectory is not None
        return episode_to_forks(store, trajectory.episode)


def test_the_forks_of_a_call_are_its_branches_with_rewards_answers_and_worth(tmp_path: Path) -> None:
    (point,) = forks_in(forked_store(tmp_path / "s.duckdb"))
    assert (point.node, point.call, point.index, point.run_id, point.variant) == ("b", 2, 2, "fork-1", None)
    assert [(branch.sample, branch.rewards, branch.answer) for branch in point.branches] == [
        (number, {"reward": reward}, "new") for number, reward in enumerate((1.0, 0.0, 1.0, 1.0))
    ]
    worth = point.worths["reward"]
    assert (worth.recorded, worth.branches, worth.resampled, worth.mean) == (0.0, 5, 4, 0.75)
    assert (worth.low, worth.high) == (pytest.approx(-0.045612, abs=1e-6), pytest.approx(1.545612, abs=1e-6))


def test_other_runs_and_variants_are_told_apart_since_their_seeds_are_the_same(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    fill(
        path,
        [
            fork_records(0, 1.0, name="cccc0001", run="fork-2"),
            fork_records(0, 0.5, name="cccc0002", run="fork-3", VARIANT="with 3", ADAPTERS='{"a":4}'),
            fork_records(0, 0.5, name="cccc0003", run="fork-4", ADAPTERS='{"a":4}'),
        ],
    )
    points = forks_in(path)
    assert [(p.run_id, p.variant, p.comparable, p.worths["reward"].branches) for p in points] == [
        ("fork-1", None, True, 5),
        ("fork-2", None, True, 2),
        ("fork-3", "with 3", False, 1),
        ("fork-4", None, False, 1),
    ]


def test_of_several_attempts_at_a_sample_the_rewarded_one_counts(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    fill(path, [fork_records(1, None, name="dddd0001"), fork_records(9, None, name="dddd0002", OUTCOME="failed")])
    (point,) = forks_in(path)
    assert [branch.sample for branch in point.branches] == [0, 1, 2, 3, 9]
    assert point.branches[1].rewards == {"reward": 0.0}
    assert (point.worths["reward"].resampled, point.branches[4].rewards) == (4, {})


def test_a_fork_names_the_call_that_it_leaves_also_where_that_was_erased(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    with TraceStore.open(path) as store:
        fork, parent = store.trajectory(named("bbbb0000")), store.trajectory(PARENT)
        assert fork is not None
        assert parent is not None
        assert episode_to_origin(store, fork.episode) == ForkOrigin(PARENT, "z", node="b", call=2)
        assert episode_to_origin(store, parent.episode) is None
        assert episode_to_forks(store, fork.episode) == []
    fill(tmp_path / "alone.duckdb", [fork_records(0, 1.0)])
    with TraceStore.open(tmp_path / "alone.duckdb") as store:
        assert episode_to_origin(store, fork.episode) == ForkOrigin(PARENT, "z", node=None, call=None)


def test_show_draws_the_forks_of_an_episode_and_whose_fork_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forked_store(tmp_path / "s.duckdb", HOSTILE)
    code, out, _ = traces(capsys, "show", "aaaa", "--no-text", "--store", path)
    assert code == 0
    lines = [line.strip("│├└─ ") for line in out.splitlines()]
    start = lines.index("forks")
    short_ids = [named(f"bbbb000{sample}")[:12] for sample in range(4)]
    assert lines[start + 1 : start + 7] == [
        "#2 b, call 2, fork-1",
        "reward: recorded 0; 4 forks, mean 0.75, 95% interval -0.0456 to 1.55; recorded - mean -0.75",
        *(f"sample {n}: {short_ids[n]} reward {reward}" for n, reward in enumerate((1, 0, 1, 1))),
    ]
    assert "then" not in out
    _, out, _ = traces(capsys, "show", named("bbbb0001"), "--no-text", "--store", path)
    assert f"fork of {PARENT} at b, call 2" in out
    _, out, _ = traces(capsys, "show", PARENT, "--store", path)
    assert out.count(VISIBLE) >= 5
    assert "\x1b[2J" not in out


def test_json_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    _, out, _ = traces(capsys, "show", PARENT, "--json", "--store", path)
    parts = json.loads(out)
    assert parts["fork_of"] is None
    assert parts["forks"][0]["worths"]["reward"]["mean"] == 0.75
    assert len(parts["forks"][0]["branches"]) == 4
    _, out, _ = traces(capsys, "show", named("bbbb0001"), "--json", "--store", path)
    assert json.loads(out)["fork_of"] == {"episode_id": PARENT, "action_id": "z", "node": "b", "call": 2}


def test_lists_mark_forks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    _, out, _ = traces(capsys, "list", "--json", "--store", path)
    assert [row["fork_of"] for row in json.loads(out)] == [*[PARENT] * 4, None]
    _, out, _ = traces(capsys, "list", "--store", path)
    assert "fork of" in out.splitlines()[0].split("\t")
    console = terminal()
    list_episodes(path, Filters(), 20, as_json=False, console=console)
    assert written(console).count(f"fork of {PARENT[:8]}: ") == 4


def test_show_draws_forks_of_forks_to_the_leaves_and_the_way_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    names = ["bbbb0001", *(f"cc{n:06d}" for n in range(230))]
    below = [deeper_fork(name, parent, 0.25, VARIANT=HOSTILE) for parent, name in itertools.pairwise(names)]
    fill(path, below)
    _, out, _ = traces(capsys, "show", PARENT, "--no-text", "--store", path)
    lines = out.splitlines()
    first, second = (next(n for n, line in enumerate(lines) if f": {named(name)[:12]} " in line) for name in names[1:3])
    assert lines[first].endswith(f"#2 b, call 2, fork-2, {VISIBLE}, sample 0: cc0000000000 reward 0.25")
    assert second == first + 1
    assert lines[second].index("#0") > lines[first].index("#2")
    assert "forks of forks that are left out: 30;" in out
    assert "\x1b[2J" not in out
    _, out, _ = traces(capsys, "show", named(names[2]), "--no-text", "--store", path)
    assert f"fork of {named(names[1])} at b, call 1" in out
    assert "that is a fork of bbbb00010000 at b, call 2, that is a fork of aaaa00010000 at b, call 2" in out
    _, out, _ = traces(capsys, "show", PARENT, "--json", "--store", path)
    parts = json.loads(out)
    assert (len(parts["deeper_forks"]), parts["omitted_forks"]) == (200, 30)
    assert [fork["level"] for fork in parts["deeper_forks"][:3]] == [2, 3, 4]
