"""The command line, the recorder, the model server and the comparison: what joins graphs, traces and trainer.

The public names are loaded when they are first used, so that `import marft_bridge` costs no torch and no LangGraph.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marft_bridge.episode import EpisodeContext, current_episode
    from marft_bridge.errors import BridgeError
    from marft_bridge.instrumentation import instrument, uninstrument
    from marft_bridge.policy import NodeChat
    from marft_bridge.record import Recorder
    from marft_bridge.recorded_graph import RecordedGraph, wrap
    from marft_bridge.scripted import ScriptedPolicy

__all__ = [
    "BridgeError",
    "EpisodeContext",
    "NodeChat",
    "RecordedGraph",
    "Recorder",
    "ScriptedPolicy",
    "current_episode",
    "instrument",
    "uninstrument",
    "wrap",
]

_HOME = {
    "BridgeError": "errors",
    "EpisodeContext": "episode",
    "NodeChat": "policy",
    "RecordedGraph": "recorded_graph",
    "Recorder": "record",
    "ScriptedPolicy": "scripted",
    "current_episode": "episode",
    "instrument": "instrumentation",
    "uninstrument": "instrumentation",
    "wrap": "recorded_graph",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
