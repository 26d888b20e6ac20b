"""The clock and the random numbers of an app -> those of its recorded run, while it is replayed.

Random numbers: `random` and numpy begin with the seed that is given. The clock stands at the start of the recorded run
for the app's own modules: those that lie neither in Python's library nor among installed packages, by the names
that they hold when the replay begins. Invariants: libraries, LangGraph and the recorder keep their clock; the state of
all of it is as before when the block ends.
"""

from __future__ import annotations

import datetime as real_datetime
import random
import sys
import sysconfig
import time as real_time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN_PACKAGES = ("marft_bridge", "trace_store", "trainers")


@contextmanager
def pinned(*, start_ns: int, freeze_time: bool, seed: int | None) -> Iterator[None]:
    """While the block runs: the clock at `start_ns` of Unix time, and random numbers from `seed`, where asked for."""
    with ExitStack() as stack:
        if seed is not None:
            stack.enter_context(_seeded(seed))
        if freeze_time:
            stack.enter_context(_frozen(start_ns))
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def _frozen(start_ns: int) -> Iterator[None]:
    replacements = _frozen_names(start_ns)
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        if not _is_apps_own(module):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            frozen = replacements.get(id(value))
            if frozen is not None:
                changed.append((names, name, value))
                names[name] = frozen
    try:
        yield
    finally:
        for names, name, value in changed:
            names[name] = value


def _is_apps_own(module: ModuleType | None) -> bool:
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or module is None or module.__name__.partition(".")[0] in _OWN_PACKAGES:
        return False
    return not str(Path(path).resolve()).startswith(_LIBRARIES) and "site-packages" not in path


def _frozen_names(start_ns: int) -> dict[int, Any]:
    """id of what a module may hold of the clock -> what it holds while the clock stands still."""
    start_s = start_ns / 1e9

    # Only the classes stand in: every moment is one of Python's own, which checkpoints keep as they are and which a
    # library's are too. A class that the app derives meanwhile is as ever.
    class Frozen(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            is_own = cls in classes.values()
            return isinstance(instance, cls.__mro__[1]) if is_own else super().__instancecheck__(instance)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return cls.__mro__[1](*args, **kwargs) if cls in classes.values() else super().__call__(*args, **kwargs)

    class FrozenDate(real_datetime.date, metaclass=Frozen):
        @classmethod
        def today(cls) -> Any:
            return real_datetime.date.fromtimestamp(start_s)

    class FrozenDatetime(real_datetime.datetime, metaclass=Frozen):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real_datetime.datetime.fromtimestamp(start_s, tz)

        @classmethod
        def today(cls) -> Any:
            return real_datetime.datetime.fromtimestamp(start_s)

        @classmethod
        def utcnow(cls) -> Any:
            return real_datetime.datetime.fromtimestamp(start_s, real_datetime.UTC).replace(tzinfo=None)

    def at_start(function: Any) -> Any:
        return lambda seconds=None: function(start_s if seconds is None else seconds)

    def strftime(form: str, moment: Any = None) -> str:
        return real_time.strftime(form, real_time.localtime(start_s) if moment is None else moment)

    functions = {
        "time": lambda: start_s,
        "time_ns": lambda: start_ns,
        "localtime": at_start(real_time.localtime),
        "gmtime": at_start(real_time.gmtime),
        "ctime": at_start(real_time.ctime),
        "strftime": strftime,
    }
    classes: dict[str, Any] = {"date": FrozenDate, "datetime": FrozenDatetime}
    replacements: dict[int, Any] = {id(real_time): _copy_of(real_time, functions)}
    replacements[id(real_datetime)] = _copy_of(real_datetime, classes)
    replacements |= {id(getattr(real_time, name)): function for name, function in functions.items()}
    replacements |= {id(getattr(real_datetime, name)): frozen for name, frozen in classes.items()}
    return replacements


def _copy_of(module: ModuleType, changes: dict[str, Any]) -> ModuleType:
    """A module with everything of another one, but for what is changed."""
    frozen = ModuleType(module.__name__, module.__doc__)
    frozen.__dict__.update(vars(module) | changes)
    return frozen
