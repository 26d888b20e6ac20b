"""Values of built-in and standard types <-> JSON data; what is no plain value becomes a reference to an object.

Used on both sides of the wall between an answer and its tests, so it imports the standard library only. Invariants:
reading data runs no code that the data names and makes exact built-in types; lists, dicts, sets and other containers
have a number, so that one that occurs twice, or in itself, is read as one object.
"""

from __future__ import annotations

import builtins
import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_WRITTEN_AS_IS = {type(None), bool, float, str}
_LARGE = 1 << 1024  # longer integers go as hexadecimal digits, which take time in proportion to their length
_TYPES = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    object,
    type(None),
)
_NAME_OF_TYPE = {kind: kind.__name__ for kind in _TYPES}
_TYPE_OF_NAME = {name: kind for kind, name in _NAME_OF_TYPE.items()}
_EMPTY: dict[Any, Any] = {}
_KEYS, _VALUES, _ITEMS = type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())
# Classes of modules that are imported only where such a value occurs: how a value is written, and read again.
_LIBRARY_CLASSES: Mapping[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "time"): lambda value: [value.hour, value.minute, value.second, value.microsecond],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("datetime", "datetime"): lambda value: [
        *(value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    ],
}


class BrokenDataError(ValueError):
    """The data is not what `Encoder` writes."""


class Encoder:
    """Values of one message -> data.

    Args:
        to_reference: what stands for an object that is no plain value.
        class_name: the name under which both sides know the class of an object, or None.
        numbers: containers that the other side knows, by id().
    """

    def __init__(
        self,
        to_reference: Callable[[Any], list[Any]],
        class_name: Callable[[Any], str | None],
        numbers: Mapping[int, int] | None = None,
    ) -> None:
        self._to_reference, self._class_name = to_reference, class_name
        self._numbers = dict(numbers or {})
        self._written: set[int] = set()
        self.containers: dict[int, Any] = {}

    def assume_written(self) -> None:
        """From here on the known containers are written as references to what the other side has."""
        self._written |= set(self._numbers.values())

    def encode(self, value: Any) -> Any:
        """The data of a value. Raises RecursionError for one that is nested too deeply."""
        kind = type(value)
        if kind in _WRITTEN_AS_IS:
            return value
        if kind is int:
            return value if -_LARGE < value < _LARGE else ["int", hex(value)]
        if kind is tuple:
            return ["tuple", self._encode_items(value)]
        if kind in _CONTAINERS or self._class_name(value) is not None:
            return self._encode_container(value)
        return self._encode_rare(value, kind)

    def _encode_items(self, values: Any) -> list[Any]:
        items = list(values)
        kinds = set(map(type, items))
        if kinds <= _WRITTEN_AS_IS or (kinds == {int} and min(items) > -_LARGE and max(items) < _LARGE):
            return items
        return [self.encode(item) for item in items]

    def _encode_container(self, value: Any) -> list[Any]:
        number = self._numbers.setdefault(id(value), len(self._numbers))
        if number in self._written:
            return ["known", number]
        self._written.add(number)
        self.containers[number] = value  # which keeps it alive, and so its id its own
        tag = _CONTAINERS.get(type(value))
        if tag is None:
            return ["object", number, self._class_name(value), self._encode_items(_pairs(_state_of(value)))]
        if tag == "bytearray":
            return [tag, number, value.hex()]
        if tag == "deque":
            return [tag, number, self._encode_items(value), value.maxlen]
        return [tag, number, self._encode_items(_pairs(value) if tag in _DICTS else value)]

    def _encode_rare(self, value: Any, kind: type) -> list[Any]:
        if kind is frozenset:
            return ["frozenset", self._encode_items(value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", self._encode_items((value.start, value.stop, value.step))]
        if kind is _KEYS or kind is _VALUES:
            return ["keys" if kind is _KEYS else "values", self._encode_items(value)]
        if kind is _ITEMS:
            return ["items", self._encode_items(part for pair in value for part in pair)]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if kind is type and value in _NAME_OF_TYPE:
            return ["type", _NAME_OF_TYPE[value]]
        if kind is type and is_built_in_exception(value):
            return ["type", value.__name__]
        write = _LIBRARY_CLASSES.get((kind.__module__, kind.__qualname__))
        if write is not None and getattr(value, "tzinfo", None) is None:
            return ["library", kind.__module__, kind.__qualname__, write(value)]
        return self._to_reference(value)


def _pairs(mapping: Any) -> Iterator[Any]:
    for key, value in mapping.items():
        yield key
        yield value


_CONTAINERS: dict[type, str] = {
    list: "list",
    dict: "dict",
    set: "set",
    bytearray: "bytearray",
    collections.deque: "deque",
    collections.Counter: "Counter",
    collections.OrderedDict: "OrderedDict",
    collections.defaultdict: "defaultdict",
}
_DICTS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}


def _state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    state = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot != "__dict__" and slot != "__weakref__" and hasattr(value, slot):
                state[slot] = getattr(value, slot)
    return state


def is_built_in_exception(value: Any) -> bool:
    """Whether it is one of the exception classes of Python itself."""
    return isinstance(value, type) and issubclass(value, BaseException) and vars(builtins).get(value.__name__) is value


class Decoder:
    """Data of one message -> values.

    Args:
        from_reference: the object that a reference stands for; raises what it likes.
        class_of: the class that both sides know under a name.
        containers: the containers that the data may name as known, by number; those that are read are added.
    """

    def __init__(
        self,
        from_reference: Callable[[list[Any]], Any],
        class_of: Callable[[str], type | None],
        containers: dict[int, Any],
    ) -> None:
        self._from_reference, self._class_of, self._containers = from_reference, class_of, containers

    def decode(self, data: Any) -> Any:
        """The value. Raises BrokenDataError, or another Exception, for data that `Encoder` did not write."""
        kind = type(data)
        if kind in _WRITTEN_AS_IS or kind is int:
            return data
        if kind is not list or not data or type(data[0]) is not str:
            raise BrokenDataError("neither a value nor a tagged list")
        tag, *parts = data
        if tag == "tuple":
            return tuple(self._decode_items(parts[0]))
        if tag in _TAGS_OF_CONTAINERS:
            return self._decode_container(tag, parts)
        if tag == "known":
            return self._containers[parts[0]]
        return self._decode_rare(data)

    def _decode_items(self, items: Any) -> list[Any]:
        if type(items) is not list:
            raise BrokenDataError("items that are no list")
        if list not in set(map(type, items)) and dict not in set(map(type, items)):
            return items
        return [self.decode(item) for item in items]

    def _decode_pairs(self, items: Any) -> Iterator[tuple[Any, Any]]:
        flat = self._decode_items(items)
        return zip(flat[::2], flat[1::2], strict=True)

    def _decode_container(self, tag: str, parts: list[Any]) -> Any:
        number = parts[0]
        if type(number) is not int or number in self._containers:
            raise BrokenDataError("a container without a number of its own")
        container: Any
        if tag == "bytearray":
            container = self._containers[number] = bytearray.fromhex(parts[1])
        elif tag == "deque":
            container = self._containers[number] = collections.deque(maxlen=parts[2])
            container.extend(self._decode_items(parts[1]))
        elif tag == "list":
            container = self._containers[number] = []
            container.extend(self._decode_items(parts[1]))
        elif tag == "set":
            container = self._containers[number] = set()
            container.update(self._decode_items(parts[1]))
        elif tag == "object":
            kind = self._class_of(parts[1])
            if kind is None:
                raise BrokenDataError("an object of an unknown class")
            container = self._containers[number] = object.__new__(kind)
            set_state(container, dict(self._decode_pairs(parts[2])))
        else:
            container = self._containers[number] = _DICTS[tag]()
            for key, value in self._decode_pairs(parts[1]):
                container[key] = value
        return container

    def _decode_rare(self, data: list[Any]) -> Any:
        match data:
            case ["int", str(digits)]:
                return int(digits, 16)
            case ["frozenset", items]:
                return frozenset(self._decode_items(items))
            case ["bytes", str(digits)]:
                return bytes.fromhex(digits)
            case ["complex", float(real), float(imaginary)]:
                return complex(real, imaginary)
            case ["range", [start, stop, step]]:
                return range(self.decode(start), self.decode(stop), self.decode(step))
            case ["keys", items]:
                return dict.fromkeys(self._decode_items(items)).keys()
            case ["values", items]:
                return dict(enumerate(self._decode_items(items))).values()
            case ["items", items]:
                return dict(self._decode_pairs(items)).items()
            case ["constant", "Ellipsis" | "NotImplemented" as name]:
                return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[name]
            case ["type", str(name)]:
                kind = _TYPE_OF_NAME.get(name) or vars(builtins).get(name)
                if kind in _NAME_OF_TYPE or is_built_in_exception(kind):
                    return kind
            case ["library", str(module), str(name), [*arguments]] if (module, name) in _LIBRARY_CLASSES:
                if all(type(argument) in (int, str) for argument in arguments):
                    return getattr(__import__(module), name)(*arguments)
            case _:
                return self._from_reference(data)
        raise BrokenDataError("a value that does not exist")


_TAGS_OF_CONTAINERS = {*_CONTAINERS.values(), "object"}


def set_state(value: Any, state: Mapping[str, Any]) -> None:
    """Sets the attributes of an object of a class that both sides know, past the class's own ways of setting them."""
    for name, attribute in state.items():
        if type(name) is not str or name.startswith("__"):
            raise BrokenDataError("an attribute without a name")
        object.__setattr__(value, name, attribute)


def refill(containers: Mapping[int, Any], contents: Mapping[int, Any]) -> None:
    """Gives each container what the one of the same number holds in `contents`, keeping every container itself.

    Raises:
        BrokenDataError: two of the same number are not of the same type.
    """
    original_of = {id(contents[number]): container for number, container in containers.items() if number in contents}

    def swap(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(swap(part) for part in value)
        return original_of.get(id(value), value)

    for number, container in containers.items():
        content = contents.get(number)
        if content is None:
            continue
        if type(content) is not type(container):
            raise BrokenDataError("a container changed its type")
        if isinstance(container, (list, collections.deque, bytearray)):
            items = [swap(item) for item in content]
            container.clear()
            container.extend(items)
        elif isinstance(container, set):
            items = list(content)
            container.clear()
            container.update(items)
        elif isinstance(container, dict):
            pairs = [(key, swap(value)) for key, value in content.items()]
            container.clear()
            for key, value in pairs:
                container[key] = value
        else:
            state = {name: swap(attribute) for name, attribute in _state_of(content).items()}
            for name in set(_state_of(container)) - set(state):
                object.__delattr__(container, name)
            set_state(container, state)
