"""A reward function that the user wrote -> what a run earned: how it is called, and the values that it may return.

A plain function runs in a thread of its own, an async one on the loop, so that neither stops the other episodes.
Invariants: whatever the function raises, and a return value of another shape, is an error of the episode that names the
function; what a call started is over soon after it (`call_threads`); `MAX_LATE_CALLS` that cannot be ended, or
`MAX_LEFT_THREADS`, end the run. The time limit is the caller's: it cancels the call.
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

from marft_bridge.common.errors import GraphError, RewardFailedError
from marft_bridge.common.import_name import load_name
from marft_bridge.rewards.call_threads import Leftovers, RewardCall
from marft_bridge.rewards.contract import ANY_LEVEL, Absent, Earned, Kind, NeedsResult, RewardOptions, RunView
from marft_bridge.rewards.time_limit import comes_from_outside

MAX_LATE_CALLS = 8  # of one function, still busy after their time limit: as many end the run
MAX_LEFT_THREADS = 64  # of all ended calls of one function
_LEVELS: Mapping[str, Literal["agent", "step"]] = {"agent": "agent", "step": "step"}


class UnstoredState:
    """Stands for a final state that is not known any more: every use of it raises `NeedsResult`."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NeedsResult("it reads the final state, which is not stored")

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __eq__ = __hash__ = __str__ = __call__ = _refuse
    __repr__ = __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __sub__ = _refuse
    __class__ = property(_refuse)  # what isinstance() asks

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)


class UserFunction:
    """A user's function, called as (task, result) or, where it takes a third argument, (task, result, run)."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self.source = source
        self._function = function
        self.takes_run = _takes_run(function)
        self.leftovers = Leftovers(source)

    async def __call__(self, run: RunView) -> Any:
        """What the function returns for a run.

        Raises:
            Absent: it raised that, or reads a final state that is not stored.
            RewardFailedError: it raised anything else, whatever it was.
            GraphError: too many calls of it do not end.
        """
        result = UnstoredState() if run.rescoring else run.result
        arguments = (run.task, result, run) if self.takes_run else (run.task, result)
        self._refuse_endless()
        call, is_late = RewardCall(self.leftovers), True
        try:
            if _is_async(self._function):
                with call.entered():
                    value = self._function(*arguments)
            else:
                value = await self._call_in_thread(call, arguments)
            if inspect.isawaitable(value):
                with call.entered():
                    value = await value
        except (Absent, RewardFailedError):
            is_late = False
            raise
        except BaseException as error:
            if comes_from_outside(error):
                raise
            is_late = isinstance(error, GeneratorExit)  # closed, since it caught its cancellation
            raise self._to_failure(error) from error
        else:
            is_late = False
            return value
        finally:
            call.end(is_late=is_late)

    def _to_failure(self, error: BaseException) -> RewardFailedError:
        return RewardFailedError(f"the reward {self.source!r} failed: {type(error).__name__}: {error}")

    def _refuse_endless(self) -> None:
        endless_calls = self.leftovers.endless_calls()
        if sum(call.is_late for call in endless_calls) >= MAX_LATE_CALLS:
            raise GraphError(
                f"the reward {self.source!r}: {MAX_LATE_CALLS} calls of it still run after their time limit; "
                "have it give up"
            )
        if sum(len(call.remaining()) for call in endless_calls) >= MAX_LEFT_THREADS:
            raise GraphError(
                f"the reward {self.source!r}: {MAX_LEFT_THREADS} threads that it started go on after its calls and "
                "cannot be ended; have them give up"
            )

    async def _call_in_thread(self, call: RewardCall, arguments: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def set_outcome(value: Any, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((value, error))

        def call_function() -> None:
            value, error = None, None
            try:
                value = context.run(self._function, *arguments)
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            call.finish_thread()
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(set_outcome, value, error)

        with call.entered():
            context = copy_context()
            # Not a pool: the interpreter waits for a pool's threads when it ends.
            threading.Thread(target=call_function, name="reward", daemon=True).start()
        value, error = await outcome
        if isinstance(error, Absent):
            raise error
        if error is not None:  # of that thread, so none of it is a Ctrl-C or a cancellation
            raise self._to_failure(error) from error
        return value


def _takes_run(function: Callable[..., Any]) -> bool:
    """Whether it has a third positional parameter without a default, or one that is called `run`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not tell
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 2 and (positional[2].default is inspect.Parameter.empty or positional[2].name == "run")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def value_to_earned_by_name(value: Any, source: str) -> dict[str, list[Earned]]:
    """The return value of `graph.reward` -> rewards by name: a mapping from names, or one value called `reward`.

    Raises:
        RewardFailedError: a value has none of the shapes of `value_to_earned`, or one mapping names rewards and owners.
    """
    if isinstance(value, Mapping) and not _has_target_keys(value):
        if targets := [str(key) for key in value if _is_target(key)]:
            raise RewardFailedError(
                f"the reward {source!r} gave {targets[0]!r} beside names of rewards; put it under a name of its own, "
                f'as in {{"helped": {{"{targets[0]}": 1.0}}}}'
            )
        return {str(name): value_to_earned(reward, str(name), source) for name, reward in value.items()}
    if value is None:
        raise RewardFailedError(f"the reward {source!r} gave None as 'reward', not a finite number")
    return {"reward": value_to_earned(value, "reward", source)}


def value_to_earned(value: Any, name: str, source: str) -> list[Earned]:
    """One reward in one of the documented shapes: a number (the team's), None (absent), `Earned`, a list of `Earned`,
    or a mapping from `agent:NODE` or `step:ACTION_ID` to numbers.

    Raises:
        RewardFailedError: it is something else, or a number that is not finite.
    """
    if value is None:
        return []
    if isinstance(value, Earned):
        return [_check_earned(value, name, source)]
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, Earned) for part in value):
        return [_check_earned(part, name, source) for part in value]
    if isinstance(value, Mapping) and _has_target_keys(value):
        return [_check_earned(_target_to_earned(str(target), number), name, source) for target, number in value.items()]
    return [_check_earned(Earned(value), name, source)]


def _has_target_keys(value: Mapping[Any, Any]) -> bool:
    """Whether every key of a mapping names an owner: `agent:NODE` or `step:ACTION_ID`."""
    return bool(value) and all(map(_is_target, value))


def _is_target(key: Any) -> bool:
    return str(key).partition(":")[0] in _LEVELS and ":" in str(key)


def _target_to_earned(target: str, value: Any) -> Earned:
    level, _, owner = target.partition(":")
    if _LEVELS[level] == "agent":
        return Earned(value, "agent", node=owner)
    return Earned(value, "step", action_id=owner)


def _check_earned(earned: Earned, name: str, source: str) -> Earned:
    value: Any = earned.value
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardFailedError(f"the reward {source!r} gave {value!r} as {name!r}, not a finite number")
    # Whether a level takes an action id, and a node.
    required_owner = {"episode": (False, False), "step": (True, False), "agent": (False, True)}.get(earned.level)
    if required_owner != (bool(earned.action_id), bool(earned.node)):
        raise RewardFailedError(
            f"the reward {source!r} gave {earned!r} as {name!r}; level 'step' takes an action_id, level 'agent' a node"
        )
    return Earned(number, earned.level, earned.action_id, node=earned.node)


class PythonOptions(RewardOptions):
    """A function that you write: (task, final state) or (task, final state, run), plain or async."""

    kind: Literal["python"] = "python"
    function: str = Field(min_length=1)
    """Its name, `package.module:function` or `path/file.py:function`."""

    def source(self) -> str:
        """The function."""
        return self.function

    @property
    def declared_level(self) -> str:
        """ANY_LEVEL: the return value of the function decides."""
        return "agent" if self.agent is not None else ANY_LEVEL


@lru_cache(maxsize=64)
def _load_function(name: str, key: str) -> UserFunction:
    function = load_name(name, key)
    if not callable(function):
        raise GraphError(f"{key}: {name!r} is a {type(function).__name__}, not a function")
    return UserFunction(function, name)


def check_function(options: PythonOptions) -> None:
    """Raises GraphError for a name that leads to no function."""
    declared_function(options)


def declared_function(options: PythonOptions) -> UserFunction:
    """The function of a table. Raises GraphError as `check_function`."""
    return _load_function(options.function, f"rewards.{options.name}.function")


async def python(options: PythonOptions, run: RunView) -> list[Earned]:
    """See `PythonOptions`."""
    value = await declared_function(options)(run)
    return value_to_earned(value, options.name, options.function)


KINDS = (Kind(PythonOptions, python, check_function),)
