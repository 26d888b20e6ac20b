"""`marft-bridge rank --propose-rubric`: tasks and their runs' answers -> a rubric in a new file, by a model.

Invariants: nothing is judged by the proposal, which a person reads and passes to `rank --rubric`; no file is written
over; what a model proposed is a template only where this project wrote it (`rewards/rubric_proposal.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.commands.rank import Group, read_groups, read_texts
from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.rewards.contract import Absent, ModelAddress
from marft_bridge.rewards.judge import JudgeOptions, read_key
from marft_bridge.rewards.judge_requests import Verdict, request_verdict
from marft_bridge.rewards.rubric import rubric_to_text
from marft_bridge.rewards.rubric_proposal import (
    Proposal,
    ShownTask,
    criteria_to_rubric,
    proposal_messages,
    reply_to_proposal,
    tasks_to_fields,
)
from marft_bridge.traces.store_reader import open_for_reading

_TASKS = 6  # that are shown, at most
_MAX_TOKENS = 1024  # of the reply


@dataclass(frozen=True, slots=True)
class ProposeOptions:
    """The options of the command line."""

    rubric: Path  # to be written
    judge: JudgeOptions  # who is asked; its own rubric is not used
    node: str | None = None  # whose answers are shown; None: all answers of the run
    runs: int = 8  # of a task that are shown, at most


def propose_rubric(path: Path, options: ProposeOptions, reporter: Reporter) -> None:
    """Asks for a rubric, and writes it.

    Args:
        path: of the store.

    Raises:
        ConfigError: the file is there already or cannot be made; no task has two runs to compare.
        GraphError: the model refuses every request, or proposed nothing that can be used.
    """
    judge = options.judge
    if os.path.lexists(options.rubric):
        raise ConfigError(f"rank --propose-rubric: {options.rubric} is there already; name a new file")
    if not options.rubric.absolute().parent.is_dir():
        raise ConfigError(f"rank --propose-rubric: there is no folder {options.rubric.parent}; make it first")
    assert judge.base_url is not None
    assert judge.model is not None
    address = ModelAddress(judge.base_url, judge.model, read_key(judge) or "")
    with open_for_reading(path) as store:
        groups = read_groups(store, options.node, runs=options.runs)
    if not groups:
        raise ConfigError(f"rank --propose-rubric: {path} has no task with two runs to compare")
    shown_tasks = [_group_to_shown(path, group, options.node) for group in _spread(groups)]
    verdict = asyncio.run(_request_proposal(judge, address, shown_tasks))
    criteria, left_out = verdict.content.criteria, verdict.content.left_out
    tasks = [json.loads(group.task) for group in groups]
    rubric = criteria_to_rubric(criteria, tasks_to_fields(tasks))
    for task in tasks:  # what is written can be used
        rubric_to_text(rubric, task)
    try:
        with options.rubric.open("x", encoding="utf-8") as file:
            file.write(rubric)
    except OSError as error:
        raise ConfigError(f"rank --propose-rubric: cannot write {options.rubric}: {error.strerror}") from None
    for number, criterion in enumerate(criteria, start=1):
        reporter.say(f"{number}. {criterion}")
    if left_out:
        reporter.say(f"{left_out} criteria were left out, because they repeat a text of the traces")
    tokens = (verdict.prompt_tokens, verdict.sampled_tokens)
    spent = "tokens that the model did not count" if None in tokens else f"{sum(filter(None, tokens))} tokens"
    reporter.say(
        f"{options.rubric} written for {spent}, from {len(shown_tasks)} of {len(groups)} tasks. Who wrote the "
        f"traces may have had a say in it: read it, change it, then rank by it with --rubric {options.rubric}"
    )
    reporter.give(
        {
            "rubric": str(options.rubric),
            "tasks": len(shown_tasks),
            "criteria": list(criteria),
            "left_out": left_out,
            "prompt_tokens": verdict.prompt_tokens,
            "sampled_tokens": verdict.sampled_tokens,
        }
    )


async def _request_proposal(
    judge: JudgeOptions, address: ModelAddress, shown_tasks: list[ShownTask]
) -> Verdict[Proposal]:
    texts = [text for shown in shown_tasks for text in (shown.task, *shown.answers)]
    try:
        return await request_verdict(
            judge.model_copy(update={"max_tokens": _MAX_TOKENS}),
            address,
            lambda mark, nonce: proposal_messages(shown_tasks, mark=mark, nonce=nonce),
            read=lambda reply, nonce: reply_to_proposal(reply, nonce, texts),
        )
    except Absent as error:
        reason = str(error).removeprefix("the judge gave no score: ")
        raise GraphError(f"rank --propose-rubric: no rubric was proposed: {reason}") from None


def _spread(groups: list[Group]) -> list[Group]:
    """At most `_TASKS` of them, evenly from first to last."""
    if len(groups) <= _TASKS:
        return groups
    return [groups[round(place * (len(groups) - 1) / (_TASKS - 1))] for place in range(_TASKS)]


def _group_to_shown(path: Path, group: Group, node: str | None) -> ShownTask:
    texts = read_texts(path, group, node)
    return ShownTask(group.task, tuple(dict.fromkeys(texts[episode_id] for episode_id in group.episode_ids)))
