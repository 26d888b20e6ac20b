"""The command line, the recorder, the model server and the comparison: what joins graphs, traces and trainer.

The public names are loaded when they are first used, so that `import marft_bridge` costs no torch and no LangGraph.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marft_bridge.common.errors import BridgeError
    from marft_bridge.model_calls.node_chat_model import NodeChat
    from marft_bridge.model_calls.scripted_model import ScriptedPolicy
    from marft_bridge.recording.episode_context import EpisodeContext, current_episode
    from marft_bridge.recording.instrument import instrument, uninstrument
    from marft_bridge.recording.recorder import Recorder
    from marft_bridge.recording.wrap import RecordedGraph, wrap

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

_NAME_TO_MODULE = {
    "BridgeError": "common.errors",
    "EpisodeContext": "recording.episode_context",
    "NodeChat": "model_calls.node_chat_model",
    "RecordedGraph": "recording.wrap",
    "Recorder": "recording.recorder",
    "ScriptedPolicy": "model_calls.scripted_model",
    "current_episode": "recording.episode_context",
    "instrument": "recording.instrument",
    "uninstrument": "recording.instrument",
    "wrap": "recording.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_NAME_TO_MODULE[name]}"), name)
    except ModuleNotFoundError as error:
        from marft_bridge.common.extras import missing_module_to_line

        line = missing_module_to_line(error.name)
        if line is None:
            raise
        raise ImportError(f"{name}: {line}") from error


def __dir__() -> list[str]:
    return __all__
