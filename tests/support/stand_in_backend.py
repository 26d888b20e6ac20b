"""A backend of a collector that is made of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from langchain_core.language_models import BaseChatModel

from marft_bridge.model_calls.routing import Route


@dataclass(frozen=True)
class StandInBackend:
    """See `rollouts.collector.Backend`."""

    route: Callable[[str, int, float | None], Route]
    chat: BaseChatModel | None = None
    lineage: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    came_back: Callable[[float], bool] = lambda _: False
