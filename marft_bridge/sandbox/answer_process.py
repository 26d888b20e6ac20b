"""A task's setup and an answer's program -> a process that does what the judge of the tests asks for, by data.

Runs inside the sandbox, beside the answer, which can change all of it: nothing here is trusted by anybody. The process
is given neither the tests nor what they expect, only the calls that they make, one after the other.
"""

from __future__ import annotations

import enum
import io
import operator
import os
import sys
from collections.abc import Callable, Iterator
from types import CoroutineType, ModuleType
from typing import Any

if __package__:
    from marft_bridge.sandbox.call_channel import Channel, ChannelBrokenError
else:  # loaded by `confine`, without the project on the path
    from call_channel import Channel, ChannelBrokenError  # type: ignore[import-not-found, no-redef]

_MODULE = "answer"  # the __name__ of what the setup and the program define
_MAX_PRINTED = 64 << 10  # characters of one reply; what is more goes to standard error, which is limited


class TestObject:
    """Stands for a function, an iterator or an object of the tests, which a test gave to the answer."""

    def __init__(self, channel: AnswerChannel, number: int) -> None:
        vars(self).update(_channel=channel, _number=number)

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        """Calls the function of the tests."""
        return self._channel.request("call", self, *arguments, **names)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._channel.request("next", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._channel.request("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.request("set_attribute", self, name, value)


class AnswerChannel(Channel):
    """The answer's end."""

    def __init__(self, read_fd: int, write_fd: int, names: dict[str, Any]) -> None:
        super().__init__(read_fd, write_fd)
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.failure: BaseException | None = None
        self.setup_names: dict[str, Any] = {}
        self.printed = _Printed()

    def to_reference(self, value: Any) -> list[Any]:
        """["mine", its number, what it is]; the object is kept for as long as the process."""
        if type(value) is TestObject:
            return ["yours", vars(value)["_number"]]
        if isinstance(value, enum.Enum) and self.class_of(type(value).__name__) is type(value):
            return ["member", type(value).__name__, value.name]
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if type(value) is CoroutineType:
            return ["mine", number, "coroutine"]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["mine", number, [kind.__name__ for kind in value.__mro__ if issubclass(kind, BaseException)]]
        return ["mine", number, "object"]

    def from_reference(self, data: list[Any]) -> Any:
        """See `Channel`."""
        match data:
            case ["yours", int(number)]:
                return self._objects[number]
            case ["member", str(name), str(member)]:
                return self.class_of(name)[member]  # type: ignore[index]
            case ["mine", int(number), *_]:
                return TestObject(self, number)
        raise ValueError("no reference")

    def class_name(self, value: Any) -> str | None:
        """The name of a class of the setup, also where the answer has defined it again."""
        name = type(value).__name__
        is_known = name in self.setup_names and not isinstance(value, (enum.Enum, BaseException))
        return name if is_known and self.class_of(name) is type(value) else None

    def class_of(self, name: str) -> type | None:
        """The class of that name: the answer's, or that of the setup."""
        if name not in self.setup_names:
            return None
        candidates = (self._names.get(name), self.setup_names[name])
        return next((kind for kind in candidates if isinstance(kind, type) and kind.__module__ == _MODULE), None)

    def perform(self, operation: str, arguments: list[Any], names: dict[str, Any]) -> Any:
        """One of the operations below, or a name of the answer's."""
        if self.failure is not None:
            raise self.failure
        if operation == "names":
            return [
                name
                for name, value in self._names.items()
                if name not in self.setup_names or self.setup_names[name] is not value
            ]
        if operation == "name":
            return self._names[arguments[0]]
        return _OPERATIONS[operation](*arguments, **names)

    def take_printed(self) -> str:
        """The text that went to `sys.stdout` since the last reply."""
        return self.printed.take()


class _Printed(io.TextIOBase):
    """A text that grows up to a limit; the rest goes to standard error."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def write(self, text: str) -> int:
        if self._length + len(text) <= _MAX_PRINTED:
            self._parts.append(text)
            self._length += len(text)
        else:
            os.write(2, text.encode(errors="replace"))
        return len(text)

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        self._length = 0
        return text


def _content(value: Any) -> Any:
    """What an object of a class derived from a built-in one holds, in that one; NotImplemented for another."""
    readers: dict[type, Callable[[Any], Any]] = {
        int: lambda whole: int.__add__(whole, 0),
        float: lambda number: float.__pos__(number),
        complex: lambda number: complex.__pos__(number),
        str: lambda text: str.__str__(text),
        bytes: lambda digits: bytes(memoryview(digits)),
        tuple: lambda items: tuple(tuple.__iter__(items)),
        list: lambda items: list(list.__iter__(items)),
        set: lambda items: set(set.__iter__(items)),
        frozenset: lambda items: frozenset(frozenset.__iter__(items)),
        dict: lambda pairs: {key: dict.__getitem__(pairs, key) for key in dict.__iter__(pairs)},
    }
    return next((read(value) for kind, read in readers.items() if isinstance(value, kind)), NotImplemented)


def _operate(name: str, left: Any, right: Any) -> Any:
    return getattr(operator, name)(left, right)


def _call(function: Any, *arguments: Any, **names: Any) -> Any:
    return function(*arguments, **names)


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _exit(manager: Any) -> Any:
    return type(manager).__exit__(manager, None, None, None)


def _wait_for(awaitable: Any) -> Any:
    import asyncio  # which takes longer to load than most programs to run

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "attribute": getattr,
    "set_attribute": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "iterate": iter,
    "next": next,
    "length": len,
    "truth": bool,
    "text": str,
    "shown": repr,
    "format": format,
    "is_instance": isinstance,
    "content": _content,
    "operate": _operate,
    "enter": _enter,
    "exit": _exit,
    "wait_for": _wait_for,
}


def main(job: dict[str, Any]) -> None:
    """The entry point: descriptor 0 is what the judge asks, 1 what it is answered, 2 whatever the program writes."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(2, 1)
    os.close(null_fd)
    module = sys.modules[_MODULE] = ModuleType(_MODULE)  # where dataclasses and pickle look classes up
    names = vars(module)
    channel = AnswerChannel(read_fd, write_fd, names)
    sys.stdin, sys.stdout = open(0, encoding="utf-8", closefd=False), channel.printed  # noqa: SIM115
    try:
        exec(compile(job["setup"], "setup", "exec", dont_inherit=True), names)  # noqa: S102
        channel.setup_names = dict(names)
        exec(compile(job["program"], "answer", "exec", dont_inherit=True), names)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 - each name that the judge asks for raises it
        channel.failure = error
    try:
        channel.serve()
    except ChannelBrokenError:
        return
