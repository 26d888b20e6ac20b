"""Stores of an app whose nodes call hosted models, made by hand: calls, answers and rewards that a test counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.growth_rig import fill, trace_id
from support.sample_spans import START, SampleTrace
from trace_store.journal import JournalRecord
from trace_store.records import Reward

SECOND = 10**9


def messages(role: str, text: str) -> str:
    return json.dumps([{"role": role, "content": text}])


def hosted(
    trace: SampleTrace, name: str, inside: str, span: tuple[int, int], question: str, answer: str, **changed: Any
) -> None:
    """One call of a hosted model: no token ids, 100 prompt and 10 sampled tokens; `span` is in seconds."""
    attributes = {
        **dict.fromkeys(("PROMPT_IDS", "SAMPLED_IDS", "LOGPROBS")),
        "RESPONSE_MODEL": "m1",
        "USAGE_INPUT_TOKENS": 100,
        "USAGE_OUTPUT_TOKENS": 10,
        "INPUT_MESSAGES": messages("user", question),
        "OUTPUT_MESSAGES": messages("assistant", answer),
    }
    trace.call(name, inside, span[0] * SECOND, span[1] * SECOND, **(attributes | changed))


def small_episode(
    number: int, task: str, reward: float, choice: str, idle: bool, **root: Any
) -> tuple[SampleTrace, list[JournalRecord]]:
    """router -> writer, and idle beside the router, whose answer goes nowhere. The router takes 1 + number seconds."""
    trace = SampleTrace(f"{number:x}", START + number)
    router = trace.node("router:1", 0, 9 * SECOND, step=1)
    hosted(trace, f"r{number}", router, (0, 1 + number), f"{task}?", choice)
    if idle:
        beside = trace.node("idle:1", 0, 9 * SECOND, step=1)
        hosted(trace, f"i{number}", beside, (0, 1), f"{task}?", f'{{"n": {number}}}', RESPONSE_MODEL="m2")
    writer = trace.node("writer:1", 10 * SECOND, 20 * SECOND, step=2, after=("router:1",))
    counts = {"USAGE_OUTPUT_TOKENS": None} if number == 0 else {}
    hosted(trace, f"w{number}", writer, (10, 12), f"{task}, {choice}", f"text {number}", **counts)
    spans = trace.spans(TASK_ID=task, TASK=json.dumps({"id": task}), SPLIT="live", ADAPTERS="{}", **root)
    return trace, [*spans, Reward(trace.trace_id, "right", reward, "test", 1)]


SMALL = (
    (0, "A", 1.0, "yes", True),
    (1, "A", 0.0, "no", True),
    (2, "A", 1.0, "yes", False),
    (3, "B", 0.0, "no", True),
    (4, "B", 0.0, "no", False),
)
"""Number, task, reward, the router's answer, and whether idle acts."""


def small_store(path: Path) -> Path:
    """Five episodes of two tasks, one side of a comparison, one held out, and a fork: the last three do not count."""
    records = [small_episode(*row)[1] for row in SMALL]
    records.append(small_episode(5, "A", 1.0, "yes", True, VARIANT="without writer")[1])
    trace, _ = small_episode(6, "B", 1.0, "yes", True)
    records.append(trace.spans(TASK_ID="B", SPLIT="heldout", ADAPTERS="{}"))
    trace, _ = small_episode(7, "B", 1.0, "yes", True)
    records.append(trace.spans(PARENT_EPISODE=trace_id("0"), FORK_ACTION="r0", ADAPTERS="{}"))
    fill(path, records)
    return path


def many_calls(path: Path, answers: dict[str, Callable[[int], str]], count: int, **changed: Any) -> Path:
    """As many episodes, one task each; every node answers one question, one node after the other."""
    records = []
    for number in range(count):
        trace, before = SampleTrace(f"{number:x}", START + number), ""
        for step, (node, answer) in enumerate(answers.items(), start=1):
            inside = trace.node(
                f"{node}:1", step * SECOND, (step + 1) * SECOND, step=step, after=(before,) * bool(before)
            )
            before = f"{node}:1"
            hosted(trace, f"{step}-{number}", inside, (step, step + 1), f"{node} {number}", answer(number), **changed)
        spans = trace.spans(TASK_ID=f"t{number}", TASK=json.dumps({"q": number}), SPLIT="live", ADAPTERS="{}")
        records.append([*spans, Reward(trace.trace_id, "right", float(number % 2), "test", 1)])
    fill(path, records)
    return path
