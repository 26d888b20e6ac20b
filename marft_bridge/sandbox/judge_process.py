"""A task's setup and tests -> which tests pass, on an answer that runs in another process.

Runs inside a sandbox of its own. What the tests call by a name of the answer's is called over there; arguments go and
results come as plain data, and are compared here. Invariants: a value that comes from the answer is of an exact
built-in type, or an `AnswerObject`, whose equality with a value of the test is decided here, from data; no value that
a test expects leaves this process; a test during which the answer broke the protocol does not pass.
"""

from __future__ import annotations

import ast
import builtins
import enum
import io
import json
import operator
import os
import symtable
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import suppress
from types import CodeType, CoroutineType, ModuleType
from typing import Any

if __package__:
    from marft_bridge.sandbox.call_channel import Channel, ChannelBrokenError
else:  # loaded by `confine`, without the project on the path
    from call_channel import Channel, ChannelBrokenError  # type: ignore[import-not-found, no-redef]

_SETTLE = "__settle_arguments__"
_MODULE = "tests"  # the __name__ of what the setup and the tests define here
_READABLE_DUNDERS = {"__name__", "__qualname__"}
# Each of the first has a reflected form.
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class AnswerObject:
    """Stands for an object of the answer that is no plain value: a function, a class, an instance, a generator.

    Calls, attributes, items, iteration, length, truth and text are asked for over there. Against a value of the test
    it is what it holds where its class derives from a built-in one, and else equal to nothing: the value stays here.
    """

    __slots__ = ("_channel", "_number")

    _channel: JudgeChannel
    _number: int

    def __init__(self, channel: JudgeChannel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        """Calls it in the answer's process."""
        return self._channel.request("call", self, *arguments, **names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return self._channel.request("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.request("set_attribute", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._channel.request("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._channel.request("set_item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._channel.request("delete_item", self, key)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._channel.request("iterate", self)
        return iterator

    def __next__(self) -> Any:
        return self._channel.request("next", self)

    def __len__(self) -> int:
        length: int = self._channel.request("length", self)
        return length

    def __bool__(self) -> bool:
        truth: bool = self._channel.request("truth", self)
        return truth

    def __str__(self) -> str:
        text: str = self._channel.request("text", self)
        return text

    def __repr__(self) -> str:
        text: str = self._channel.request("shown", self)
        return text

    def __format__(self, form: str) -> str:
        text: str = self._channel.request("format", self, form)
        return text

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, AnswerObject):
            return any(item is value or item == value for item in self)
        content = self.plain_content()
        return any(item is value or item == value for item in (self if content is NotImplemented else content))

    def __hash__(self) -> int:
        try:
            content = self.plain_content()
            return hash(self._number if content is NotImplemented else content)
        except TypeError:
            return hash(self._number)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, AnswerObject) and self._channel.request("is_instance", value, self) is True

    def __enter__(self) -> Any:
        return self._channel.request("enter", self)

    def __exit__(self, *_: object) -> bool:
        return self._channel.request("exit", self) is True

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._channel.to_coroutine(self).__await__()

    def __int__(self) -> int:
        return int(self._number_content())

    def __index__(self) -> int:
        return operator.index(self._number_content())

    def __float__(self) -> float:
        return float(self._number_content())

    def __abs__(self) -> Any:
        return abs(self._number_content())

    def __neg__(self) -> Any:
        return -self._number_content()

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number_content(), digits)

    def plain_content(self) -> Any:
        """What it holds as a plain value; NotImplemented where it does not derive from a built-in type."""
        return self._channel.content_of(self, self._number)

    def _number_content(self) -> Any:
        content = self.plain_content()
        if type(content) not in (int, float, complex):
            raise TypeError("an object of the answer is no number")
        return content


def _to_operator(name: str, *, reflected: bool) -> Callable[[AnswerObject, Any], Any]:
    function: Callable[[Any, Any], Any] = getattr(operator, name)

    def operate(self: AnswerObject, operand: Any) -> Any:
        if isinstance(operand, AnswerObject):
            return self._channel.request("operate", name, *((operand, self) if reflected else (self, operand)))
        content = self.plain_content()
        if content is NotImplemented:
            return NotImplemented
        return function(operand, content) if reflected else function(content, operand)

    return operate


for _name in _COMPARISONS:
    setattr(AnswerObject, f"__{_name}__", _to_operator(_name, reflected=False))
for _name in _OPERATORS:
    _dunder = _name.strip("_")
    setattr(AnswerObject, f"__{_dunder}__", _to_operator(_name, reflected=False))
    setattr(AnswerObject, f"__r{_dunder}__", _to_operator(_name, reflected=True))


class JudgeChannel(Channel):
    """The tests' end.

    What the answer can reach of this process is what a test gave it, and of that only calls of functions, the next item
    of iterators, and attributes without an underscore of objects whose class the setup or a test defines.
    """

    settles_at_once = False

    def __init__(self, read_fd: int, write_fd: int) -> None:
        super().__init__(read_fd, write_fd)
        self._answer_objects: dict[int, Any] = {}
        self._contents: dict[int, Any] = {}  # by the object's number; see `content_of`
        self._given: list[tuple[Any, str]] = []
        self._given_numbers: dict[int, int] = {}
        self.setup_classes: dict[str, type] = {}

    def request(self, operation: str, *arguments: Any, **names: Any) -> Any:
        """See `Channel`. A StopIteration that is not the end of an iterator is a RuntimeError, as in a generator: it
        would end the `map` or `zip` of a test as if all had been compared."""
        try:
            return super().request(operation, *arguments, **names)
        except StopIteration as stop:
            if operation == "next":
                raise
            raise RuntimeError("the answer raised StopIteration") from stop

    def content_of(self, stand_in: AnswerObject, number: int) -> Any:
        """See `AnswerObject.plain_content`. What cannot change is asked for once: else a program that has got at its
        own process could give each comparison of a test what that one wants."""
        if number in self._contents:
            return self._contents[number]
        content = self.request("content", stand_in)
        if isinstance(content, AnswerObject):
            content = NotImplemented
        with suppress(TypeError):  # one that can change has no hash
            hash(content)
            self._contents[number] = content
        return content

    def to_reference(self, value: Any) -> list[Any]:
        """See `Channel`. Raises TypeError for what no answer should reach into: modules, frames, tracebacks."""
        if isinstance(value, AnswerObject):
            return ["yours", value._number]
        if isinstance(value, enum.Enum) and self.setup_classes.get(type(value).__name__) is type(value):
            return ["member", type(value).__name__, value.name]
        kind = _kind_of_given(value)
        if kind is None:
            raise TypeError(f"a test cannot give an answer a {type(value).__name__}")
        number = self._given_numbers.setdefault(id(value), len(self._given))
        if number == len(self._given):
            self._given.append((value, kind))
        return ["mine", number, kind]

    def from_reference(self, data: list[Any]) -> Any:
        """See `Channel`. Raises ValueError for what is no reference."""
        match data:
            case ["yours", int(number)] if 0 <= number < len(self._given):
                return self._given[number][0]
            case ["member", str(name), str(member)] if isinstance(self.setup_classes.get(name), enum.EnumMeta):
                return self.setup_classes[name][member]  # type: ignore[index]
            case ["mine", int(number), "object" | "coroutine" | [*_] as kind]:
                if number not in self._answer_objects:
                    stand_in = AnswerObject(self, number)
                    if type(kind) is list:
                        names = kind[: next((n + 1 for n, name in enumerate(kind) if _is_exception(name)), len(kind))]
                        self._answer_objects[number] = self.exception_class(names)
                    else:
                        self._answer_objects[number] = self.to_coroutine(stand_in) if kind == "coroutine" else stand_in
                return self._answer_objects[number]
        raise ValueError("no reference")

    def to_coroutine(self, awaitable: AnswerObject) -> Coroutine[Any, Any, Any]:
        """A coroutine of this process that has the answer's process wait for one of its own."""

        async def wait() -> Any:
            return self.request("wait_for", awaitable)

        return wait()

    def class_name(self, value: Any) -> str | None:
        """The name of a class of the setup that can be made from data."""
        name = type(value).__name__
        is_known = self.setup_classes.get(name) is type(value) and not isinstance(value, (enum.Enum, BaseException))
        return name if is_known else None

    def class_of(self, name: str) -> type | None:
        """The setup's own class, never the answer's."""
        kind = self.setup_classes.get(name)
        return None if kind is None or issubclass(kind, (enum.Enum, BaseException)) else kind

    def perform(self, operation: str, arguments: list[Any], names: dict[str, Any]) -> Any:
        """See the class. Raises TypeError for everything else."""
        number = self._given_numbers.get(id(arguments[0])) if arguments else None
        kind = None if number is None else self._given[number][1]
        match operation, kind, arguments[1:]:
            case "call", "function" | "object", positional:
                return arguments[0](*positional, **names)
            case "next", "iterator", []:
                return next(arguments[0])
            case "attribute", "object", [str(name)] if not name.startswith("_"):
                return getattr(arguments[0], name)
            case "set_attribute", "object", [str(name), value] if not name.startswith("_"):
                return setattr(arguments[0], name, value)
        raise TypeError(f"an object of the tests has no {operation}")

    def show_printed(self, text: str) -> None:
        """Prints it where a test can catch it (`contextlib.redirect_stdout`)."""
        if text:
            sys.stdout.write(text)


def _is_exception(name: Any) -> bool:
    kind = vars(builtins).get(name) if type(name) is str else None
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _kind_of_given(value: Any) -> str | None:
    if isinstance(value, (io.StringIO, io.BytesIO)) or type(value).__module__ == _MODULE:
        return "object"
    if isinstance(value, CoroutineType):
        return None
    if callable(value):
        return "function"
    return "iterator" if hasattr(type(value), "__next__") else None


class _TestNames(dict[str, Any]):
    """The globals of the tests: what they and the setup define; then the answer's names, asked for when used."""

    def __init__(self, channel: JudgeChannel) -> None:
        super().__init__({"__name__": _MODULE, _SETTLE: channel.settle})
        self._channel = channel
        self.tested_names: frozenset[str] = frozenset()

    def __missing__(self, name: str) -> Any:
        if name in vars(builtins) and name not in self.tested_names:
            raise KeyError(name)
        return self._channel.request("name", name)


class _Settling(ast.NodeTransformer):
    """Has arguments take the contents that a call left in them when its statement is over, not before: what a test
    compares a result with is worked out from arguments as the test made them."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and not isinstance(node, ast.ClassDef):
                opens = isinstance(node, (ast.ExceptHandler, ast.If, ast.While, ast.For, ast.Try, ast.With))
                setattr(node, field, _settle_between(statements, first=opens and bool(statements)))
        return node


def _settle_between(statements: Sequence[ast.stmt], *, first: bool) -> list[ast.stmt]:
    def settle() -> ast.stmt:
        return ast.parse(f"{_SETTLE}()").body[0]

    settled = [settle()] if first else []
    for statement in statements:
        settled.append(statement)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not is_future and any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            settled.append(settle())
    return settled


def text_to_code(text: str) -> CodeType:
    """A test, compiled so that arguments settle between its statements. Raises SyntaxError or ValueError."""
    compile(text, "test", "exec", dont_inherit=True)  # some errors are found only here
    tree = ast.fix_missing_locations(_Settling().visit(ast.parse(text, "test")))
    return compile(tree, "test", "exec", dont_inherit=True)


def texts_to_global_names(texts: Sequence[str]) -> frozenset[str]:
    """The global names that tests read and never bind: what only the setup, Python or the answer can mean."""
    read_names, bound_names = set(), set()
    for text in texts:
        module = symtable.symtable(text, "test", "exec")
        tables = [module]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            for symbol in table.get_symbols():
                if table is module and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                    bound_names.add(symbol.get_name())
                if symbol.is_referenced() and (symbol.is_global() or table is module):
                    read_names.add(symbol.get_name())
    return frozenset(read_names - bound_names)


class _Sink(io.TextIOBase):
    """Where the tests print."""

    def write(self, text: str) -> int:
        return len(text)


def main(job: dict[str, Any]) -> None:
    """The entry point: descriptor 0 is what the answer's process says, 1 what it is asked, 2 takes the verdicts.

    A verdict is a line of JSON: {"unreadable": reason}, {"setup": reason}, {"begun": true} or {"passed": number}.
    """
    read_fd, write_fd, verdict_fd = os.dup(0), os.dup(1), os.dup(2)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(2, 1)
    os.close(null_fd)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), _Sink(), _Sink()

    def tell(verdict: dict[str, Any]) -> None:
        os.write(verdict_fd, f"\n{json.dumps(verdict)}\n".encode())

    judge(job, JudgeChannel(read_fd, write_fd), tell)


def judge(job: dict[str, Any], channel: JudgeChannel, tell: Callable[[dict[str, Any]], None]) -> None:
    """Runs the setup without the answer, then every test, and tells what came of it.

    Args:
        job: `setup`, `tests` (texts), and `entry_point`: the name that is certainly the answer's, or None.
    """
    try:
        codes = [text_to_code(test) for test in job["tests"]]
        global_names = texts_to_global_names(job["tests"])
    except (SyntaxError, ValueError, RecursionError) as error:
        tell({"unreadable": str(error)})
        return
    names = _TestNames(channel)
    sys.modules[_MODULE] = ModuleType(_MODULE)  # dataclasses look for it
    try:
        exec(compile(job["setup"], "setup", "exec", dont_inherit=True), names)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 - it is run without the answer: whatever it raises is its own
        tell({"setup": f"{type(error).__name__}: {error}"})
        return
    channel.setup_classes = {name: kind for name, kind in names.items() if _can_be_copied(kind)}
    tell({"begun": True})
    try:
        answer_names = frozenset(name for name in channel.request("names") if type(name) is str)
    except BaseException:  # noqa: BLE001 - the program did not run to its end: nothing passes
        return
    if job["entry_point"] is not None:
        names.tested_names = frozenset({job["entry_point"]})
    elif global_names <= set(names) | set(vars(builtins)):
        # The tests use no name that only the answer can give: then it gives what it defines of those that they use.
        names.tested_names = global_names & answer_names
    for name in names.tested_names:
        names.pop(name, None)
    for number, code in enumerate(codes):
        try:
            exec(code, names)  # noqa: S102
        except BaseException:  # noqa: BLE001 - a test that raises has failed
            with suppress(ChannelBrokenError):
                channel.settle()
        else:
            if not channel.broken:
                tell({"passed": number})
        if channel.broken:
            return


def _can_be_copied(kind: Any) -> bool:
    if not isinstance(kind, type) or kind.__module__ != _MODULE:
        return False
    if issubclass(kind, enum.Enum):
        return True
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True
