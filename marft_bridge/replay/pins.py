"""The clock and the random numbers of an app -> those of its recorded run, while it is replayed.

Random numbers: `random` and numpy begin with the seed that is given. The clock stands at the start of the recorded run
for the app's own modules, by the names that they hold when the replay begins: those that lie neither in Python's
library nor in installed packages, and, wherever they lie, those in which the graph's nodes are defined, with the rest
of their packages. Invariants: LangGraph, LangChain, the recorder and what else no node is defined in keep their clock;
the state of all of it is as before when the block ends.
"""

from __future__ import annotations

import datetime as real_datetime
import functools
import random
import sys
import sysconfig
import time as real_time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

NO_CLOCK = "freeze_time stopped no clock: no module of the app's holds time or datetime"
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN_PACKAGES = ("marft_bridge", "trace_store", "trainers")
_FRAMEWORKS = ("langchain", "langgraph")  # how their packages begin: langchain_openai, langgraph_supervisor
_PARTS = (  # attributes by which graphs, nodes, runnables and tools hold what they call
    *("nodes", "builder", "branches", "bound", "runnable", "fallbacks", "default", "steps", "steps__"),
    *("first", "middle", "last", "func", "afunc", "coroutine", "tools_by_name", "_tools_by_name"),
)


@contextmanager
def pinned(graph: Any, *, start_ns: int, freeze_time: bool, seed: int | None) -> Iterator[bool]:
    """While the block runs: the clock at `start_ns` of Unix time, and random numbers from `seed`, where asked for.

    Gives whether any module of the app's got a clock that stands. `graph` is the compiled graph.
    """
    with ExitStack() as stack:
        if seed is not None:
            stack.enter_context(_seeded(seed))
        yield stack.enter_context(_frozen(graph, start_ns)) if freeze_time else False


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
def _frozen(graph: Any, start_ns: int) -> Iterator[bool]:
    replacements = _frozen_names(start_ns)
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for names in _names_of_app(graph):
        for name, value in list(names.items()):
            frozen = replacements.get(id(value))
            if frozen is not None:
                changed.append((names, name, value))
                names[name] = frozen
    try:
        yield bool(changed)
    finally:
        for names, name, value in changed:
            names[name] = value


def _names_of_app(graph: Any) -> list[dict[str, Any]]:
    """The names that the app's own modules hold: see above."""
    of_nodes = [function.__globals__ for function in _graph_to_functions(graph)]
    of_nodes = [names for names in of_nodes if not _is_library(_to_package(names))]
    packages = {_to_package(names) for names in of_nodes} - {""}
    loaded: list[Any] = list(sys.modules.values())  # None, or any object, where somebody put it there
    modules = [module for module in loaded if isinstance(module, ModuleType)]
    modules = [module for module in modules if _to_package(vars(module)) in packages or _is_apps_own(module)]
    return list({id(names): names for names in (*map(vars, modules), *of_nodes)}.values())


def _graph_to_functions(graph: Any) -> Iterator[FunctionType]:
    """The functions that the nodes, routers and tools of a compiled graph call, those of its subgraphs too."""
    parts: list[Any] = [graph]
    visited: dict[int, Any] = {}  # by identity, since parts need not be hashable
    while parts:
        part = parts.pop()
        if part is None or isinstance(part, (str, type)) or id(part) in visited:
            continue
        visited[id(part)] = part
        if isinstance(part, FunctionType):
            if (decorated := getattr(part, "__wrapped__", None)) is None:
                yield part
            parts.append(decorated)
        elif isinstance(part, MethodType):
            parts.append(part.__func__)
        elif isinstance(part, functools.partial):
            parts += [part.func, *filter(callable, part.args)]
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
        else:
            fields = getattr(part, "__dict__", {})
            parts += [fields.get(name) for name in _PARTS]
            methods = [getattr(type(part), name, None) for name in ("__call__", "invoke", "ainvoke")]
            parts += [method for method in methods if isinstance(method, FunctionType)]


def _to_package(names: Mapping[str, Any]) -> str:
    """The outermost package of the module that holds these names; empty where they have no module."""
    return str(names.get("__name__") or "").partition(".")[0]


def _is_library(package: str) -> bool:
    """Whether an outermost package is Python's, a framework's or ours, whatever of it a graph's nodes call."""
    return package.startswith(_FRAMEWORKS) or package in _OWN_PACKAGES or package in sys.stdlib_module_names


def _is_apps_own(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or _to_package(vars(module)) in _OWN_PACKAGES:
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
