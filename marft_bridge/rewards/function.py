"""A function of the user's -> what a run earned: how it is called, and the shapes that it may give back.

A plain function runs in a thread of its own, an async one on the loop, so that neither stops the other episodes.
Invariants: a value that is none of the shapes is an error that names the function; a thread that is still busy long
after its time does not keep the process from ending, and many of them end the run. It knows no time limit itself:
whoever awaits a call cancels it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import lru_cache
from typing import Any, Literal, NoReturn

from pydantic import Field

from marft_bridge.errors import GraphError
from marft_bridge.load_name import load_name
from marft_bridge.rewards.contract import ANY_LEVEL, Absent, Earned, Kind, NeedsResult, RewardOptions, RunView

MAX_LATE = 8  # threads that may be busy beyond their time before the run is given up
_LEVELS: Mapping[str, Literal["agent", "step"]] = {"agent": "agent", "step": "step"}


class NotStored:
    """Stands for a final state that is not known any more: whoever looks at it learns that."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NeedsResult("it reads the final state, which is not stored")

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __eq__ = __hash__ = __str__ = __call__ = _refuse
    __repr__ = __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __sub__ = _refuse
    __class__ = property(_refuse)  # what isinstance() asks

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)


class UserFunction:
    """One function of the user's, called as (task, result) or, where it takes a third argument, (task, result, run)."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self.source = source
        self._function = function
        self.takes_run = _takes_run(function)
        self._late: list[threading.Thread] = []

    async def __call__(self, run: RunView) -> Any:
        """What it gives for a run.

        Raises:
            Absent: it raised that, or reads a final state that is not stored.
            GraphError: it raised something else, or too many calls of it do not end.
        """
        result = NotStored() if run.rescoring else run.result
        given = (run.task, result, run) if self.takes_run else (run.task, result)
        try:
            if _is_async(self._function):
                return await self._function(*given)
            value = await self._in_thread(given)
            return await value if inspect.isawaitable(value) else value
        except (Absent, GraphError):
            raise
        except Exception as error:
            raise GraphError(f"the reward {self.source!r} failed: {type(error).__name__}: {error}") from error

    async def _in_thread(self, given: tuple[Any, ...]) -> Any:
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) >= MAX_LATE:
            raise GraphError(
                f"the reward {self.source!r}: {MAX_LATE} calls of it still run after their time limit; have it give up"
            )
        loop, context = asyncio.get_running_loop(), copy_context()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result((value, error))

        def work() -> None:
            value, error = None, None
            try:
                value = context.run(self._function, *given)
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, error)

        # Not a pool: the interpreter waits for a pool's threads when it ends.
        thread = threading.Thread(target=work, name="reward", daemon=True)
        thread.start()
        try:
            value, error = await ended
        except asyncio.CancelledError:
            self._late.append(thread)
            raise
        if error is not None:
            raise error
        return value


def _takes_run(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not tell
        return False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(named) > 2 and (named[2].default is inspect.Parameter.empty or named[2].name == "run")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def value_to_named(value: Any, source: str) -> dict[str, list[Earned]]:
    """What `graph.reward` gives -> what was earned, by name: a mapping from names, or one value called `reward`.

    Raises:
        GraphError: a value has none of the shapes of `value_to_earned`.
    """
    if isinstance(value, Mapping) and not _targets(value):
        return {str(name): value_to_earned(each, str(name), source) for name, each in value.items()}
    if value is None:
        raise GraphError(f"the reward {source!r} gave None as 'reward', not a finite number")
    return {"reward": value_to_earned(value, "reward", source)}


def value_to_earned(value: Any, name: str, source: str) -> list[Earned]:
    """One reward, in one of the shapes that are documented: a number is the team's, None is absent, `Earned` says
    for itself, a mapping has keys `agent:NODE` or `step:ACTION_ID`, and a list holds `Earned`.

    Raises:
        GraphError: it is something else, or a number that is not finite.
    """
    if value is None:
        return []
    if isinstance(value, Earned):
        return [_checked(value, name, source)]
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Earned) for item in value):
        return [_checked(item, name, source) for item in value]
    if isinstance(value, Mapping) and _targets(value):
        return [_checked(_target_to_earned(str(target), each), name, source) for target, each in value.items()]
    return [_checked(Earned(value), name, source)]


def _targets(value: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping say whose each number is."""
    return bool(value) and all(str(key).partition(":")[0] in _LEVELS and ":" in str(key) for key in value)


def _target_to_earned(target: str, value: Any) -> Earned:
    word, _, owner = target.partition(":")
    if _LEVELS[word] == "agent":
        return Earned(value, "agent", node=owner)
    return Earned(value, "step", action_id=owner)


def _checked(earned: Earned, name: str, source: str) -> Earned:
    value: Any = earned.value
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise GraphError(f"the reward {source!r} gave {value!r} as {name!r}, not a finite number")
    owned = {"episode": (False, False), "step": (True, False), "agent": (False, True)}.get(earned.level)
    if owned != (bool(earned.action_id), bool(earned.node)):
        raise GraphError(
            f"the reward {source!r} gave {earned!r} as {name!r}; level 'step' takes an action_id, level 'agent' a node"
        )
    return Earned(number, earned.level, earned.action_id, earned.node)


class PythonOptions(RewardOptions):
    """A function of yours: (task, final state) or (task, final state, run), plain or async."""

    kind: Literal["python"] = "python"
    function: str = Field(min_length=1)
    """Its name, `package.module:function` or `path/file.py:function`."""

    def source(self) -> str:
        """The function."""
        return self.function

    @property
    def level_given(self) -> str:
        """What the function gives says whose it is."""
        return "agent" if self.agent is not None else ANY_LEVEL


@lru_cache(maxsize=64)
def _loaded(name: str, key: str) -> UserFunction:
    found = load_name(name, key)
    if not callable(found):
        raise GraphError(f"{key}: {name!r} is a {type(found).__name__}, not a function")
    return UserFunction(found, name)


def check_function(options: PythonOptions) -> None:
    """Raises GraphError for a name that leads to no function."""
    _loaded(options.function, f"rewards.{options.name}.function")


async def python(options: PythonOptions, run: RunView) -> list[Earned]:
    """See `PythonOptions`."""
    value = await _loaded(options.function, f"rewards.{options.name}.function")(run)
    return value_to_earned(value, options.name, options.function)


KINDS = (Kind(PythonOptions, python, check_function),)
