"""The bytecode of a node's function -> which keys of its state it has read by each instruction.

The state is a plain object of the app, so nothing can watch its reads; what the code says is known without touching it.
`code_to_reads` follows the local variable that holds the state over all ways through the code, exceptions included. A
key is certain where every way to an instruction has read it, and possible where one may have. Invariant: a use of the
state that is not one of the few understood here makes every key possible and no later read certain, so that an opcode
of a Python that is not known here costs precision, never truth.
"""

from __future__ import annotations

import dis
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

_CONSTANT = "LOAD_CONST"
_GLOBAL = "LOAD_GLOBAL"
_LOADS = frozenset(["LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF"])
_REBINDS = frozenset(["STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF"])
# Two instructions in one, since Python 3.13.
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
# Push one value and do nothing else.
_PUSHES = frozenset([*_LOADS, _CONSTANT, _GLOBAL])
# Make one value of that many on top of the stack, and keep none of them from anybody.
_OPERANDS: dict[str, Callable[[Any], int]] = {
    "LOAD_ATTR": lambda _: 1,
    "BINARY_OP": lambda _: 2,
    "BINARY_SUBSCR": lambda _: 2,
    "COMPARE_OP": lambda _: 2,
    "BUILD_LIST": lambda count: count,
    "BUILD_TUPLE": lambda count: count,
    "BUILD_MAP": lambda count: 2 * count,
}
# Take the state from the stack and keep no way to it.
_WHOLE_READERS = frozenset(
    [
        "FORMAT_VALUE",
        "FORMAT_SIMPLE",
        "CONVERT_VALUE",
        "GET_ITER",
        "DICT_UPDATE",
        "DICT_MERGE",
        "LIST_EXTEND",
        "SET_UPDATE",
        "TO_BOOL",
        "POP_JUMP_IF_TRUE",
        "POP_JUMP_IF_FALSE",
        "POP_JUMP_FORWARD_IF_TRUE",
        "POP_JUMP_FORWARD_IF_FALSE",
    ]
)
_WHOLE_METHODS = frozenset(["copy", "items", "keys", "values"])
_KEY_METHODS = frozenset(["get", "pop", "setdefault"])
# By these a function reaches its own variables, or those of its caller, without naming them.
_FRAME_READERS = frozenset(
    ["locals", "vars", "eval", "exec", "inspect", "_getframe", "_current_frames", "currentframe", "f_locals"]
)
_NO_FALLTHROUGH = frozenset(
    [
        "RETURN_VALUE",
        "RETURN_CONST",
        "RAISE_VARARGS",
        "RERAISE",
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
    ]
)
_RETURNS = frozenset(["RETURN_VALUE", "RETURN_CONST"])

_LOOKAHEAD = 20  # instructions after a use of the state, at most, by which it is understood

Keys = frozenset[str] | None
"""Keys of the state; None for all of them."""


class ReadKeys(NamedTuple):
    """The keys that have been read, and those that may have been (None: all of the state); the second has the first."""

    certain: frozenset[str]
    possible: Keys


class CallEffect(NamedTuple):
    """What a function does to the state that it is given as its first argument, and that it does not keep."""

    reads: frozenset[str]  # for certain, when it has returned
    may_read: Keys
    changes: Keys


WHOLE_STATE = ReadKeys(frozenset(), None)
_NOTHING: frozenset[str] = frozenset()

Resolve = Callable[[str], CallEffect | None]
"""A global name -> what the function of that name does; None where that is not known."""


@dataclass(frozen=True, slots=True)
class CodeReads:
    """What a function has read of its state by each of its instructions."""

    offsets: tuple[int, ...]  # of the instructions, ascending, in bytes
    reads: tuple[ReadKeys, ...]  # before each of them
    at_return: ReadKeys  # when it has returned, whichever way
    anywhere: ReadKeys  # when it is not known where it is: nothing is certain
    changes: Keys  # keys that it may have changed
    returns_state: bool  # whoever called it may have the state again
    resolved_names: frozenset[str]  # global names whose functions these reads rely on

    def at(self, offset: int) -> ReadKeys:
        """What has been read when the function is at the instruction of this offset, which it has not finished."""
        return self.reads[max(bisect_right(self.offsets, offset) - 1, 0)]


@dataclass(frozen=True, slots=True)
class _Step:
    """One instruction."""

    offset: int
    name: str
    argument: Any
    is_target: bool  # something jumps here
    target: int | None  # offset that it jumps to


class _Effect(NamedTuple):
    """What an instruction does to the state: keys that it reads for certain or possibly, and keys that it changes."""

    reads: frozenset[str] = _NOTHING
    may_read: Keys = _NOTHING
    changes: Keys = _NOTHING


# The whole state may be read and changed by whoever has it now, at any time from now on.
_ESCAPES = _Effect(may_read=None, changes=None)
_READS_ALL = _Effect(may_read=None)
_CHANGES_ALL = _Effect(changes=None)


class _Flow(NamedTuple):
    """What holds before an instruction, over all ways to it."""

    read: frozenset[str]
    may_read: Keys
    changed: Keys  # keys that may not hold what the node was given any more

    def after(self, effect: _Effect) -> _Flow:
        """What holds after the instruction: a read of what the node itself has put there is no certain read."""
        original = _NOTHING if self.changed is None else effect.reads - self.changed
        may_read = _union(self.may_read, _union(effect.reads, effect.may_read))
        return _Flow(self.read | original, may_read, _union(self.changed, effect.changes))

    def joined(self, other: _Flow) -> _Flow:
        """What holds where two ways meet."""
        return _Flow(self.read & other.read, _union(self.may_read, other.may_read), _union(self.changed, other.changed))


def _union(left: Keys, right: Keys) -> Keys:
    return None if left is None or right is None else left | right


def code_to_reads(code: CodeType, variable: str, fields: Keys, resolve: Resolve) -> CodeReads:
    """The reads of a function's state.

    Args:
        code: of a function or a coroutine function; of a generator, everything is possible.
        variable: the parameter that is the state.
        fields: attributes of the state's class that are its keys; None for a state that is exactly a dict.
        resolve: knows the functions that the code calls by their global names.
    """
    steps = _code_to_steps(code)
    uses = _Uses(code, variable, fields, resolve=resolve)
    effects = uses.effects(steps)
    is_opaque = bool(code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)) or _reads_frames(code)
    entry = _Flow(_NOTHING, None, None) if is_opaque else _Flow(_NOTHING, _NOTHING, _NOTHING)
    flows = _steps_to_flows(code, steps, effects=effects, entry=entry)
    never_reached = _Flow(_NOTHING, entry.may_read, None)
    by_step = [flows.get(number, never_reached) for number in range(len(steps))]
    returns = [
        by_step[number].after(effects.get(number, _Effect())) for number in flows if steps[number].name in _RETURNS
    ]
    possible, changes = entry.may_read, entry.changed
    for number, flow in flows.items():
        after = flow.after(effects.get(number, _Effect()))
        possible, changes = _union(possible, after.may_read), _union(changes, after.changed)
    at_return = returns[0] if returns else never_reached
    for flow in returns:
        at_return = at_return.joined(flow)
    offsets: dict[int, ReadKeys] = {}
    for step, flow in zip(steps, by_step, strict=True):
        offsets.setdefault(step.offset, ReadKeys(flow.read, flow.may_read))
    return CodeReads(
        tuple(offsets),
        tuple(offsets.values()),
        at_return=ReadKeys(at_return.read, at_return.may_read),
        anywhere=ReadKeys(_NOTHING, possible),
        changes=changes,
        returns_state=uses.returns_state,
        resolved_names=frozenset(uses.resolved_names),
    )


def _reads_frames(code: CodeType) -> bool:
    return not _FRAME_READERS.isdisjoint(code.co_names) or any(map(_reads_frames, _inner_codes(code)))


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _code_to_steps(code: CodeType) -> list[_Step]:
    steps: list[_Step] = []
    prefix: int | None = None  # where the prefixes of the next instruction begin; jumps to it lead there
    prefix_is_target = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            prefix = instruction.offset if prefix is None else prefix
            prefix_is_target = prefix_is_target or instruction.is_jump_target
            continue
        offset = instruction.offset if prefix is None else prefix
        is_target = instruction.is_jump_target or prefix_is_target
        prefix, prefix_is_target = None, False
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        pair = _PAIRS.get(instruction.opname)
        if pair is None:
            target = instruction.argval if jumps else None
            steps.append(_Step(offset, instruction.opname, instruction.argval, is_target=is_target, target=target))
        else:
            for name, argument in zip(pair, instruction.argval, strict=True):
                steps.append(_Step(offset, name, argument, is_target=is_target, target=None))
                is_target = False
    return steps


# -- what is done with the state --------------------------------------------------------------------------------------


class _Uses:
    """Finds the uses of one variable in a function and in the functions inside it."""

    def __init__(self, code: CodeType, variable: str, fields: Keys, resolve: Resolve) -> None:
        self._code = code
        self._variable = variable
        self._fields = fields
        self._resolve = resolve
        self.resolved_names: set[str] = set()  # those that an effect relies on
        self.returns_state = False

    def effects(self, steps: Sequence[_Step]) -> dict[int, _Effect]:
        """The number of each step that does something to the state -> what."""
        effects: dict[int, _Effect] = {}
        is_shared = self._variable in (*self._code.co_cellvars, *self._code.co_freevars)
        for number, step in enumerate(steps):
            if not _names(step, self._variable) or step.name == "MAKE_CELL":
                continue
            if step.name in _REBINDS:
                uses = [(number, _CHANGES_ALL)]
            elif step.name == "LOAD_CLOSURE" or (is_shared and step.name == "LOAD_FAST"):
                uses = [(number, self._captured())]
            elif step.name in _LOADS:
                uses = self._use(steps, number)
            else:
                uses = [(number, _ESCAPES)]
            for where, effect in uses:
                effects[where] = _both(effects.get(where, _Effect()), effect)
        return effects

    def _use(self, steps: Sequence[_Step], number: int) -> list[tuple[int, _Effect]]:
        """What happens to the state that step `number` puts on the stack: the steps that do it, and what they do."""
        following = _straight_on(steps, number)
        next_name = following[0].name if following else ""
        if next_name == "POP_TOP":
            return []
        if next_name == "RETURN_VALUE":
            self.returns_state = True
            return [(number, _READS_ALL)]
        use = (self._use_of_dict if self._fields is None else self._use_of_object)(steps, number, following)
        return [use] if use is not None else self._call_by_name(steps, number, following)

    def _captured(self) -> _Effect:
        """What the functions inside this one do to the state, at any time after they were made."""
        effect = _Effect()
        for inner_code in _inner_codes(self._code):
            if self._variable not in inner_code.co_freevars:
                continue
            uses = _Uses(inner_code, self._variable, self._fields, resolve=self._resolve)
            for inner_effect in uses.effects(_code_to_steps(inner_code)).values():
                possible = _Effect(_NOTHING, _union(inner_effect.reads, inner_effect.may_read), inner_effect.changes)
                effect = _both(effect, possible)
            if uses.returns_state:
                effect = _ESCAPES
            self.resolved_names |= uses.resolved_names
        return effect

    def _use_of_dict(
        self, steps: Sequence[_Step], number: int, following: Sequence[_Step]
    ) -> tuple[int, _Effect] | None:
        """The use of a dict by what follows it on the stack; None where it is not one of these."""
        names = [step.name for step in following]
        key = following[0].argument if names[:1] == [_CONSTANT] else None
        if isinstance(key, str):
            keys = frozenset([key])
            if _is_subscript(following[1:2]):
                return number + 2, _Effect(reads=keys)
            if names[1:3] == ["COPY", "COPY"] and _is_subscript(following[3:4]):  # state["k"] += ...
                return number + 4, _Effect(reads=keys, changes=keys)
            if names[1:2] in (["STORE_SUBSCR"], ["DELETE_SUBSCR"]):
                return number + 2, _Effect(changes=keys)
        if names[:1] and names[0] in _PUSHES:
            if _is_subscript(following[1:2]):
                return number + 2, _READS_ALL
            if names[1:2] in (["STORE_SUBSCR"], ["DELETE_SUBSCR"]):
                return number + 2, _CHANGES_ALL
        if names[:1] == ["CONTAINS_OP"]:
            before = steps[number - 1] if number and not steps[number].is_target else None
            if before is not None and before.name == _CONSTANT and isinstance(before.argument, str):
                return number + 1, _Effect(reads=frozenset([before.argument]))
            return number + 1, _READS_ALL
        if names[:1] in (["LOAD_METHOD"], ["LOAD_ATTR"]):
            return self._method_of_dict(following, number)
        return (number, _READS_ALL) if names[:1] and names[0] in _WHOLE_READERS else None

    def _method_of_dict(self, following: Sequence[_Step], number: int) -> tuple[int, _Effect]:
        method = following[0].argument
        call = _call_after_pushes(following, 1)
        if call is None or call.argument_count != call.pushes:
            return number, _ESCAPES
        if method in _WHOLE_METHODS and call.pushes == 0:
            return number + call.distance, _READS_ALL
        key = following[1].argument if following[1].name == _CONSTANT else None
        if method in _KEY_METHODS and call.pushes in (1, 2) and isinstance(key, str):
            keys = frozenset([key])
            return number + call.distance, _Effect(reads=keys, changes=_NOTHING if method == "get" else keys)
        return number, _ESCAPES

    def _use_of_object(
        self, steps: Sequence[_Step], number: int, following: Sequence[_Step]
    ) -> tuple[int, _Effect] | None:
        if following and following[0].name in ("LOAD_ATTR", "LOAD_METHOD"):
            attribute = following[0].argument
            if self._fields is not None and attribute in self._fields:
                return number + 1, _Effect(reads=frozenset([attribute]))
        return None

    def _call_by_name(
        self, steps: Sequence[_Step], number: int, following: Sequence[_Step]
    ) -> list[tuple[int, _Effect]]:
        """`transcript(state, 3)`: what the function may do, from now on, and what it has done when it has returned."""
        callee = steps[number - 1] if number and not steps[number].is_target else None
        call = _call_after_pushes(following, 0)
        # The callee lies right below the state only if the call takes the state and what was pushed after it.
        if callee is None or callee.name != _GLOBAL or call is None or call.argument_count != call.pushes + 1:
            return [(number, _ESCAPES)]
        effect = self._resolve(callee.argument)
        if effect is None:
            return [(number, _ESCAPES)]
        self.resolved_names.add(callee.argument)
        may_do = _Effect(_NOTHING, _union(effect.reads, effect.may_read), effect.changes)
        return [(number, may_do), (number + call.distance, _Effect(reads=effect.reads))]


def _names(step: _Step, variable: str) -> bool:
    """Whether an instruction is about a local variable or a closure's of this name."""
    if step.name in (_CONSTANT, _GLOBAL, "LOAD_NAME", "LOAD_METHOD", "LOAD_ATTR", "STORE_ATTR", "STORE_GLOBAL"):
        return False
    opcode = dis.opmap.get(step.name)
    if opcode is not None and opcode in dis.hasname:
        return False
    return bool(step.argument == variable) if isinstance(step.argument, str) else _is_pair_with(step, variable)


def _is_pair_with(step: _Step, variable: str) -> bool:
    return (
        isinstance(step.argument, tuple)
        and step.name.startswith(("LOAD_FAST", "STORE_FAST"))
        and (variable in step.argument)
    )


def _straight_on(steps: Sequence[_Step], number: int) -> Sequence[_Step]:
    """The next steps up to the first that something jumps to: only these surely follow step `number` alone."""
    following: list[_Step] = []
    for step in steps[number + 1 : number + 1 + _LOOKAHEAD]:
        if step.is_target:
            break
        following.append(step)
    return following


def _is_subscript(steps: Sequence[_Step]) -> bool:
    """Whether it is `[...]`: an opcode of its own, an operator since Python 3.14."""
    return any(
        step.name == "BINARY_SUBSCR" or (step.name == "BINARY_OP" and step.argument == _SUBSCRIPT) for step in steps
    )


_SUBSCRIPT = next(
    (number for number, (name, _) in enumerate(getattr(dis, "_nb_ops", ())) if name == "NB_SUBSCR"), object()
)


class _Call(NamedTuple):
    """A call that takes what was pushed before it."""

    distance: int  # from the step that loads the state
    pushes: int
    argument_count: int  # more than was pushed where it takes what lay on the stack before


def _call_after_pushes(following: Sequence[_Step], start: int) -> _Call | None:
    """The call after what is pushed from `start` on; None where something else happens.

    The first value is the one that was pushed: what comes after it may be worked out (`state.get("k", options.k)`). A
    call in between takes fewer arguments than were pushed.
    """
    pushes = 0
    for distance, step in enumerate(following[start:], start=start + 1):
        if step.name == "PRECALL":
            continue
        if step.name == "CALL":
            return _Call(distance, pushes, step.argument)
        if step.name in _PUSHES:
            pushes += 1
            continue
        count_operands = _OPERANDS.get(step.name)
        operands = None if count_operands is None else count_operands(step.argument)
        if operands is None or (operands > 0 and operands >= pushes):
            return None
        pushes += 1 - operands
    return None


def _both(left: _Effect, right: _Effect) -> _Effect:
    return _Effect(left.reads | right.reads, _union(left.may_read, right.may_read), _union(left.changes, right.changes))


# -- over all ways through the code -----------------------------------------------------------------------------------


def _steps_to_flows(
    code: CodeType, steps: Sequence[_Step], effects: Mapping[int, _Effect], entry: _Flow
) -> dict[int, _Flow]:
    """The number of each step that can be reached -> what holds before it."""
    number_at = {step.offset: number for number, step in reversed(list(enumerate(steps)))}
    handlers = _handlers(code, steps, number_at)
    flows: dict[int, _Flow] = {0: entry}
    pending = [0]

    def arrive(number: int, flow: _Flow) -> None:
        joined = flows[number].joined(flow) if number in flows else flow
        if joined != flows.get(number):
            flows[number] = joined
            pending.append(number)

    while pending:
        number = pending.pop()
        step, before = steps[number], flows[number]
        after = before.after(effects.get(number, _Effect()))
        if handlers[number] is not None:
            # It may have failed before or after what it does.
            arrive(handlers[number], _Flow(before.read, after.may_read, after.changed))
        if step.target is not None:
            arrive(number_at[step.target], after)
        if step.name not in _NO_FALLTHROUGH and number + 1 < len(steps):
            arrive(number + 1, after)
    return flows


def _handlers(code: CodeType, steps: Sequence[_Step], number_at: Mapping[int, int]) -> list[Any]:
    """For each step the number of the step that handles its exceptions; None where none in this function does."""
    handlers: list[int | None] = [None] * len(steps)
    bytecode: Any = dis.Bytecode(code)
    entries: Iterable[Any] = bytecode.exception_entries
    for entry in entries:
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end:
                handlers[number] = number_at[entry.target]
    return handlers
