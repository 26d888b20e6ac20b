"""Drawn calls -> actions in the tokens of a local base model, and what could not be rendered, by reason.

The prompt is what the local chat template makes of the recorded messages, tools included, the answer what it renders
behind it (`training/retokenise.py`), also where an engine's ids are recorded, which may be another model's.
Invariant: no call is changed to make it fit; a call is an action, or is counted under one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marft_bridge.ingest.recorded_chats import UnusableChatError
from marft_bridge.move_plan.drawn_calls import DrawnCall
from marft_bridge.serving.model_config import context_length
from marft_bridge.training.retokenise import ChatTokenizer, span_to_ids
from trainers.batch import ActionItem


@dataclass(slots=True)
class LocalCalls:
    """The calls of one node, as a local model reads them; the lists are parallel."""

    items: list[ActionItem] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # reason -> calls


def calls_to_local(calls: Sequence[DrawnCall], model_dirs: Mapping[str, Path]) -> dict[str, LocalCalls]:
    """Node -> its calls in the tokens of its base model.

    Raises:
        ConfigError: a model has no chat template, or names no token at which an answer ends.
    """
    tokenizers = {path: ChatTokenizer(path) for path in dict.fromkeys(model_dirs.values())}
    limits = {path: context_length(path) for path in tokenizers}
    by_node: dict[str, LocalCalls] = {}
    for call in calls:
        local, path = by_node.setdefault(call.node, LocalCalls()), model_dirs[call.node]
        try:
            ids, _ = span_to_ids(
                call.span,
                tokenizers[path],
                finish_reason=call.finish_reason,
                offers_tools=call.offers_tools,
                max_tokens=limits[path],
            )
        except UnusableChatError as error:
            local.refused[str(error)] += 1
            continue
        local.items.append(
            ActionItem(call.node, ids.prompt, ids.answer, behaviour=None, temperature=1.0, retokenised=True)
        )
        local.groups.append(call.group)
    return by_node
