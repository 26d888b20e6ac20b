"""Two processes and two pipes -> calls from one into the other: JSON lines of plain data, each answered in its turn.

Used on both sides of the wall between an answer and its tests, so it imports the standard library only. Invariants:
what comes in is read as data and as nothing else; once a line is not what the protocol allows, the channel is broken
and every later call over it raises `ChannelBrokenError`.
"""

from __future__ import annotations

import builtins
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

if __package__:
    from marft_bridge.sandbox.plain_data import BrokenDataError, Decoder, Encoder, is_built_in_exception, refill
else:  # loaded by `confine`, without the project on the path
    from plain_data import (  # type: ignore[import-not-found, no-redef]
        BrokenDataError,
        Decoder,
        Encoder,
        is_built_in_exception,
        refill,
    )

MAX_LINE = 16 << 20  # bytes of one message
_MAX_NAMES = 50  # classes of one exception
_MAX_NAME = 200  # characters of one


class ChannelBrokenError(BaseException):
    """The other process is gone, or wrote what no side of the protocol writes. Not an Exception: no test expects it."""


class Channel:
    """One end. A side adds `to_reference`, `from_reference` and `serve`, which say what of it the other can reach.

    Args:
        read_fd, write_fd: the pipes; nobody else may use them.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._lines = open(read_fd, "rb", buffering=1 << 16)  # noqa: SIM115 - for as long as the process
        self._write_fd = write_fd
        self._number = 0
        self._lock = threading.RLock()
        self._exception_classes: dict[tuple[str, ...], type[BaseException]] = {}
        self._changed: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self.broken = False

    # -- what a side adds --

    settles_at_once = True
    """Whether arguments take what a call left in them before it returns, or when `settle` is called."""

    def to_reference(self, value: Any) -> list[Any]:
        """What stands in data for an object of this side. Raises TypeError for one that cannot be handed over."""
        raise NotImplementedError

    def from_reference(self, data: list[Any]) -> Any:
        """The object that stands in this process for what `to_reference` wrote, on either side."""
        raise NotImplementedError

    def class_name(self, value: Any) -> str | None:
        """The name by which both sides know the class of an object of the setup."""
        raise NotImplementedError

    def class_of(self, name: str) -> type | None:
        """The class of that name on this side."""
        raise NotImplementedError

    def perform(self, operation: str, arguments: list[Any], names: dict[str, Any]) -> Any:
        """Does what the other side asks for; returns or raises what the other side is told."""
        raise NotImplementedError

    def take_printed(self) -> str:
        """What this side has printed since it was last asked."""
        return ""

    def show_printed(self, text: str) -> None:
        """Prints what the other side has printed."""

    # -- calls --

    def request(self, operation: str, *arguments: Any, **names: Any) -> Any:
        """Has the other side do something, serving what it asks for meanwhile.

        Raises:
            ChannelBrokenError: there is no other side any more.
            BaseException: what the operation raised there, by its class's name and those of its bases.
        """
        with self._lock:
            self.settle()
            self._number += 1
            number = self._number
            encoder = Encoder(self.to_reference, self.class_name)
            data = [encoder.encode(argument) for argument in arguments]
            named = {name: encoder.encode(value) for name, value in names.items()}
            self._send({"ask": number, "do": operation, "with": data, "named": named})
            while True:
                message = self._receive()
                if "ask" in message:
                    self.reply_to(message)
                elif message.get("reply") == number:
                    return self._read_reply(message, encoder.containers)
                else:
                    raise self._break()

    def _read_reply(self, message: Mapping[str, Any], containers: dict[int, Any]) -> Any:
        contents: dict[int, Any] = {}
        try:
            if "changed" in message:
                decoder = Decoder(self.from_reference, self.class_of, contents)
                for data in message["changed"]:
                    decoder.decode(data)
                self._changed.append((containers, contents))
                if self.settles_at_once:
                    self.settle()
            else:
                decoder = Decoder(self.from_reference, self.class_of, dict(containers))
            error = self._data_to_error(message["raised"], decoder) if "raised" in message else None
            value = None if error is not None else decoder.decode(message["value"])
            self.show_printed(_require_text(message.get("printed", "")))
        except Exception:  # noqa: BLE001 - whatever the reader trips over, it is the writer's doing
            raise self._break() from None
        if error is not None:
            raise error
        return value

    def settle(self) -> None:
        """Has the arguments of the calls so far hold what the other side made of them."""
        while self._changed:
            containers, contents = self._changed.pop(0)
            try:
                refill(containers, contents)
            except Exception:  # noqa: BLE001 - as above
                raise self._break() from None

    def reply_to(self, message: Mapping[str, Any]) -> None:
        """Performs what a message asks for, and replies."""
        containers: dict[int, Any] = {}
        try:
            decoder = Decoder(self.from_reference, self.class_of, containers)
            arguments = [decoder.decode(data) for data in message["with"]]
            names = {_require_text(name): decoder.decode(data) for name, data in message["named"].items()}
            operation, number = _require_text(message["do"]), message["ask"]
        except Exception:  # noqa: BLE001 - as above
            raise self._break() from None
        originals = list(containers.values())
        reply: dict[str, Any] = {"reply": number}
        try:
            value = self.perform(operation, arguments, names)
            encoder = self._add_changes(reply, message["with"], arguments, containers=containers)
            reply["value"] = encoder.encode(value)
        except ChannelBrokenError:
            raise
        except BaseException as error:  # noqa: BLE001 - all of it is the outcome of the call
            reply = {"reply": number}
            encoder = self._add_changes(reply, message["with"], arguments, containers=containers)
            reply["raised"] = self._error_to_data(error, encoder)
        del originals  # held until here, so that no other object took the id of one
        reply["printed"] = self.take_printed()
        try:
            self._send(reply)
        except ValueError as error:  # too long a line
            self._send({"reply": number, "raised": self._error_to_data(error, encoder)})

    def _add_changes(
        self, reply: dict[str, Any], data: list[Any], arguments: list[Any], *, containers: Mapping[int, Any]
    ) -> Encoder:
        """An encoder for the outcome; the reply gets the arguments once more where the call has changed them."""
        numbers = {id(container): number for number, container in containers.items()}
        encoder = Encoder(self.to_reference, self.class_name, numbers)
        if not containers:
            return encoder
        changed = [encoder.encode(argument) for argument in arguments]
        if changed != data:
            reply["changed"] = changed
            return encoder
        encoder = Encoder(self.to_reference, self.class_name, numbers)
        encoder.assume_written()
        return encoder

    # -- exceptions --

    def _error_to_data(self, error: BaseException, encoder: Encoder) -> dict[str, Any]:
        names = []
        for kind in type(error).__mro__:
            names.append(kind.__name__)
            if is_built_in_exception(kind):
                break

        def encode(value: Any) -> Any:
            try:
                return encoder.encode(value)
            except (TypeError, RecursionError):
                return None

        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - a class of the answer's
            text = ""
        state = {name: encode(value) for name, value in vars(error).items() if not name.startswith("_")}
        return {"names": names, "args": [encode(value) for value in error.args], "text": text, "state": state}

    def _data_to_error(self, data: Mapping[str, Any], decoder: Decoder) -> BaseException:
        kind = self.exception_class(data["names"])
        arguments = tuple(decoder.decode(value) for value in data["args"])
        try:
            error = _built_in_of(kind).__new__(kind, *arguments)
            if is_built_in_exception(kind):
                error.__init__(*arguments)  # type: ignore[misc]
        except Exception:  # noqa: BLE001 - a group of exceptions, or one whose class takes other arguments
            error = Exception.__new__(Exception if issubclass(kind, BaseExceptionGroup) else kind)
        error.args = arguments
        if not is_built_in_exception(type(error)):
            vars(error)["_text"] = _require_text(data["text"])
        for name, value in data["state"].items():
            if not _require_text(name).startswith("_"):
                vars(error)[name] = decoder.decode(value)
        return error

    def exception_class(self, names: Any) -> type[BaseException]:
        """The class of these names, from itself to the first that is Python's own; made once where it is not."""
        if type(names) is not list or not 0 < len(names) <= _MAX_NAMES:
            raise BrokenDataError("an exception without classes")
        kind = vars(builtins).get(_require_text(names[-1])[:_MAX_NAME])
        if not is_built_in_exception(kind):
            raise BrokenDataError("an exception that is none of Python's")
        assert kind is not None
        for length in range(2, len(names) + 1):
            key = tuple(_require_text(name)[:_MAX_NAME] for name in names[-length:])
            if key not in self._exception_classes:
                self._exception_classes[key] = type(key[0], (kind,), {"__str__": _error_text})
            kind = self._exception_classes[key]
        made: type[BaseException] = kind
        return made

    # -- lines --

    def _send(self, message: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        if len(line) > MAX_LINE:
            raise ValueError(f"a message of more than {MAX_LINE >> 20} MB between the tests and the answer")
        try:
            while line:
                line = line[os.write(self._write_fd, line) :]
        except OSError:
            raise self._break() from None

    def _receive(self) -> dict[str, Any]:
        if self.broken:
            raise self._break()
        try:
            line = self._lines.readline(MAX_LINE + 1)
            message = json.loads(line)
        except (OSError, ValueError, RecursionError, MemoryError):
            raise self._break() from None
        if type(message) is not dict or not line.endswith(b"\n"):
            raise self._break()
        return message

    def _break(self) -> ChannelBrokenError:
        self.broken = True
        return ChannelBrokenError("the answer's process is gone")

    def serve(self) -> None:
        """Answers until the other side is gone."""
        while True:
            message = self._receive()
            if "ask" not in message:
                raise self._break()
            self.reply_to(message)


def _require_text(value: Any) -> str:
    if type(value) is not str:
        raise BrokenDataError("no text")
    return value


def _built_in_of(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if is_built_in_exception(base))


def _error_text(error: BaseException) -> str:
    own: Callable[..., str] = _built_in_of(type(error)).__str__
    return vars(error).get("_text") or own(error)
