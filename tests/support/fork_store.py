"""A store with an episode and its forks, made by hand: rewards, answers and attempts that a test can count."""

from __future__ import annotations

import json
from pathlib import Path

from support.growth_rig import fill
from support.sample_spans import START, SampleTrace
from trace_store.journal import JournalRecord
from trace_store.records import Reward


def named(digits: str) -> str:
    """The id of an episode that begins with these digits."""
    return digits.ljust(32, "0")


PARENT = named("aaaa0001")


def said(text: str) -> str:
    return json.dumps([{"role": "assistant", "content": text}])


def parent_records(answer: str = "recorded") -> list[JournalRecord]:
    """x by a, then y and z by b, one after the other; the team reward is 0."""
    t = SampleTrace(PARENT)
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    t.call("y", t.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39)
    t.call("z", t.node("b:2", 50, 60, step=3, after=("b:1",)), 51, 59, OUTPUT_MESSAGES=said(answer))
    return [*t.spans(), Reward(t.trace_id, "reward", 0.0, "test", 1)]


def fork_records(
    sample: int, reward: float | None, answer: str = "new", *, name: str = "", run: str = "fork-1", **root: str
) -> list[JournalRecord]:
    """A fork that leaves the parent at z, the second call of b."""
    t = SampleTrace(named(name or f"bbbb000{sample}"), START + 1000 * (sample + 1))
    t.call(f"x{t.trace_id[:8]}", t.node("a:1", 10, 20, step=1), 11, 19, REPLAYED_FROM="x")
    t.call(f"y{t.trace_id[:8]}", t.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39, REPLAYED_FROM="y")
    node = t.node("b:2", 50, 60, step=3, after=("b:1",))
    t.call(f"z{t.trace_id[:8]}", node, 51, 59, OUTPUT_MESSAGES=said(answer))
    spans = t.spans(PARENT_EPISODE=PARENT, FORK_ACTION="z", SAMPLE=sample, **({"RUN_ID": run} | root))
    return [*spans, *([] if reward is None else [Reward(t.trace_id, "reward", reward, "test", 1)])]


def deeper_fork(name: str, parent: str, reward: float | None = None, **root: str) -> list[JournalRecord]:
    """A fork, of one sample, that leaves the fork `parent` at z, as that left its own parent. Both by their digits."""
    t = SampleTrace(named(name), START + 100_000)
    call = f"z{named(parent)[:8]}" if named(parent) != PARENT else "z"
    t.call(f"z{t.trace_id[:8]}", t.node("b:2", 50, 60, step=3), 51, 59, OUTPUT_MESSAGES=said("again"))
    spans = t.spans(**({"PARENT_EPISODE": named(parent), "FORK_ACTION": call, "RUN_ID": "fork-2"} | root))
    return [*spans, *([] if reward is None else [Reward(t.trace_id, "reward", reward, "test", 1)])]


def forked_store(path: Path, answer: str = "new", **root: str) -> Path:
    """The parent and four forks of one run with the rewards 1, 0, 1, 1; the store's other forks are the test's."""
    forks = [fork_records(sample, reward, answer, **root) for sample, reward in enumerate((1.0, 0.0, 1.0, 1.0))]
    fill(path, [parent_records(answer), *forks])
    return path
