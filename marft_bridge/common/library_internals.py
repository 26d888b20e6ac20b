"""The private names of LangGraph and LangChain that this package depends on, all in one place.

Recording needs LangGraph's commits and task starts, redirection the methods below every provider's chat model; neither
has a public hook. Invariant: no other module imports a private name of theirs. A release that moves one is refused
before anything is recorded or redirected: `require_internals` names the library, the name and the tested versions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from marft_bridge.common.errors import BridgeError

TESTED_VERSIONS = {"langgraph": "1.2.22", "langchain-core": "1.8.2", "langchain-openai": "1.7.4"}
"""Distribution -> the newest release that the tests ran on."""
RECORDED = ("langgraph", "langchain-core")
"""The libraries that recording hooks."""

# Methods of BaseChatModel that every call of a chat model passes. A provider's class may override the outer ones; the
# inner pair catches its calls all the same. v3 is `stream_events(version="v3")`.
CHAT_V3 = ("_chat_model_stream_v3", "_achat_model_stream_v3")
CHAT_INNER = ("_generate_with_cache", "_agenerate_with_cache")
CHAT_ENTRIES = ("generate", "agenerate", "stream", "astream", *CHAT_V3, *CHAT_INNER)


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name of another library, and the parameters that our calls of it pass."""

    library: str
    module: str
    name: str  # with dots inside the module
    parameters: tuple[str, ...] | None = None  # None: not a function

    def problem(self) -> str | None:
        """What the installed release has changed about it; None if nothing."""
        try:
            symbol: Any = import_module(self.module)
            for part in self.name.split("."):
                symbol = None if _is_field(symbol, part) else getattr(symbol, part)
        except (ImportError, AttributeError):
            return f"{self.module}.{self.name} is gone"
        if self.parameters is None:
            return None
        accepted = inspect.signature(symbol).parameters
        missing_parameters = [name for name in self.parameters if name not in accepted]
        return f"{self.module}.{self.name} takes no {missing_parameters[0]!r} any more" if missing_parameters else None


def _is_field(owner: Any, name: str) -> bool:
    """Whether objects of a class have this attribute, though the class itself has not."""
    return isinstance(owner, type) and any(name in vars(cls).get("__annotations__", {}) for cls in owner.__mro__)


_LOOP = "langgraph.pregel._loop"
_CHAT_MODEL = "langchain_core.language_models.chat_models"
_OPENAI = "langchain_openai.chat_models.base"
_STEP = ("input", "config")
_WRITES = ("self", "task_id", "writes", "cached")
_PROMPTS = ("self", "prompts", "stop", "run_managers")
_MESSAGES, _INPUT = ("self", "messages", "stop"), ("self", "input", "config", "stop")

INTERNALS = (
    Internal("langgraph", _LOOP, "PregelLoop.put_writes", parameters=_WRITES),
    Internal(
        "langgraph",
        _LOOP,
        "PregelLoop.output_writes",
        parameters=("self", "task_id", "writes", "cached"),
    ),
    Internal("langgraph", _LOOP, "PregelLoop._first", parameters=("self", "input_keys")),
    Internal("langgraph", _LOOP, "PregelLoop._put_checkpoint", parameters=("self", "metadata")),
    *(
        Internal("langgraph", _LOOP, f"PregelLoop.{name}")
        for name in (
            *("manager", "tasks", "nodes", "specs", "channels", "status", "input", "config"),
            *("checkpointer", "checkpoint", "checkpoint_metadata", "prev_checkpoint_config"),
            *("_has_persisted_parent", "_addressed_checkpoint_superseded"),
            *("interrupt_before", "interrupt_after", "is_nested", "store"),
        )
    ),
    Internal("langgraph", "langgraph.pregel._runner", "run_with_retry", parameters=("task", "retry_policy")),
    Internal("langgraph", "langgraph.pregel._runner", "arun_with_retry", parameters=("task", "retry_policy")),
    Internal("langgraph", "langgraph.pregel._algo", "task_path_str", parameters=("tup",)),
    Internal("langgraph", _LOOP, "PregelLoop.__init__", parameters=("trigger_to_nodes",)),  # and keeps it
    # The steps of a node, of which the first is the node's own; and how an error handler's task is made.
    Internal("langgraph", "langgraph._internal._runnable", "RunnableSeq.__init__", parameters=("steps",)),
    Internal(
        "langgraph",
        "langgraph.pregel._algo",
        "prepare_node_error_handler_task",
        parameters=("failed_task", "handler_node_name"),
    ),
    Internal("langgraph", "langgraph.pregel._read", "PregelNode.error_handler_node"),
    Internal("langgraph", "langgraph.pregel.protocol", "PregelProtocol"),
    Internal("langgraph", "langgraph.graph._branch", "BranchSpec._route", parameters=("self", "input", "reader")),
    Internal("langgraph", "langgraph.graph._branch", "BranchSpec._aroute", parameters=("self", "input", "reader")),
    Internal(
        "langgraph",
        "langgraph._internal._runnable",
        "RunnableCallable",
        parameters=("func", "afunc", "recurse", "explode_args"),
    ),
    *(
        Internal("langgraph", "langgraph._internal._runnable", f"RunnableCallable.{name}", parameters=("self", *_STEP))
        for name in ("invoke", "ainvoke")
    ),
    Internal("langgraph", "langgraph.checkpoint.base", "writes_sort_key", parameters=("task_path",)),
    *(
        Internal("langgraph", "langgraph._internal._constants", name)
        for name in ("CONFIG_KEY_RUNTIME", "ERROR", "INTERRUPT", "NO_WRITES", "PUSH", "RESUME", "RETURN", "TASKS")
    ),
    Internal("langchain-core", "langchain_core.tracers.context", "_configure_hooks"),
    Internal("langchain-core", "langchain_core.runnables.config", "var_child_runnable_config"),
    *(
        Internal("langchain-core", _CHAT_MODEL, f"BaseChatModel.{name}", parameters=_MESSAGES)
        for name in ("generate", "agenerate", *CHAT_INNER)
    ),
    *(
        Internal("langchain-core", _CHAT_MODEL, f"BaseChatModel.{name}", parameters=_INPUT)
        for name in ("stream", "astream", *CHAT_V3)
    ),
    *(
        Internal("langchain-core", "langchain_core.language_models.llms", f"BaseLLM.{name}", parameters=_PROMPTS)
        for name in ("_generate_helper", "_agenerate_helper")
    ),
    *(
        Internal("langchain-openai", _OPENAI, f"BaseChatOpenAI.{name}", parameters=parameters)
        for name, parameters in {
            "_get_request_payload": ("self", "input_", "stop"),
            "_get_invocation_params": ("self", "stop"),
            "_get_ls_params": ("self", "stop"),
            "_create_chat_result": ("self", "response", "generation_info"),
            "_convert_chunk_to_generation_chunk": ("self", "chunk", "default_chunk_class", "base_generation_info"),
            "_use_responses_api": ("self", "payload"),
            "_generate": (*_MESSAGES, "run_manager"),
            "_agenerate": (*_MESSAGES, "run_manager"),
            "_stream": (*_MESSAGES, "run_manager"),
            "_astream": (*_MESSAGES, "run_manager"),
        }.items()
    ),
)


def broken_internals(internals: Sequence[Internal] = INTERNALS) -> list[str]:
    """A line for each name that the installed releases have removed or changed: library, version, what is wrong."""
    problems = ((internal.library, internal.problem()) for internal in internals)
    return [
        f"{library} {version(library)}: {problem} (tried with {TESTED_VERSIONS[library]})"
        for library, problem in problems
        if problem is not None
    ]


@functools.cache
def require_internals(*libraries: str) -> None:
    """Refuses releases of these libraries whose internals have moved. Checks once per process.

    Recording names langgraph and langchain-core; redirection langchain-openai too, whose import takes half a second.

    Raises:
        BridgeError: the first thing that moved, and which releases work.
    """
    if problems := broken_internals([internal for internal in INTERNALS if internal.library in libraries]):
        suffix = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        pins = " ".join(f"'{library}<={newest}'" for library, newest in TESTED_VERSIONS.items())
        raise BridgeError(f"marft-bridge does not know this release: {problems[0]}{suffix}; pip install {pins}")


try:
    from langchain_core.runnables.config import var_child_runnable_config
    from langchain_core.tracers.context import _configure_hooks as configure_hooks
    from langgraph._internal._constants import (
        CONFIG_KEY_RUNTIME,
        ERROR,
        INTERRUPT,
        NO_WRITES,
        PUSH,
        RESUME,
        RETURN,
        TASKS,
    )
    from langgraph._internal._runnable import RunnableCallable
    from langgraph.checkpoint.base import writes_sort_key
    from langgraph.graph._branch import BranchSpec
    from langgraph.pregel import _runner as runner
    from langgraph.pregel._algo import task_path_str
    from langgraph.pregel._loop import PregelLoop
    from langgraph.pregel.protocol import PregelProtocol
except ImportError:
    require_internals(*RECORDED)
    raise

__all__ = [
    "CHAT_ENTRIES",
    "CHAT_INNER",
    "CHAT_V3",
    "CONFIG_KEY_RUNTIME",
    "ERROR",
    "INTERNALS",
    "INTERRUPT",
    "NO_WRITES",
    "PUSH",
    "RESUME",
    "RETURN",
    "TASKS",
    "TESTED_VERSIONS",
    "BranchSpec",
    "Internal",
    "PregelLoop",
    "PregelProtocol",
    "RunnableCallable",
    "broken_internals",
    "configure_hooks",
    "require_internals",
    "runner",
    "task_path_str",
    "var_child_runnable_config",
    "writes_sort_key",
]
