"""Owns: what an answer can do to earn a code reward without solving its task: nothing.

- Each forgery is scored as in a run, by tests in every form that is in use, and earns exactly 0; none raises.
- A forgery that also ends, hangs or floods its process costs the tests that it did not pass, and no more.
- The arguments that a test works its expectation out from are those that the test made.
- What the answer's process is given holds no test and no expected value.
"""

# ruff: noqa: E501 - a program in one line each
from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.reward_rig import table
from support.tiers import one_in

from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer
from marft_bridge.sandbox import programs as sandbox
from marft_bridge.sandbox.programs import Isolation

TESTS = [
    "assert add(1, 2) == 3",
    "assert add(2, 5) == 7, 'no sum'",
    "assert abs(add(0.5, 0.25) - 0.75) < 1e-9",
    "import math\nassert math.isclose(add(1, 2), 3)",
    "assert add(1, 2) in (3,) and 3 in [add(1, 2)]",
    "assert add([1], [2]) == [1, 2]",
    "assert isinstance(add(1, 2), int) and 2 < add(1, 2) < 4",
    "x = [1]\nassert add(x, [2]) == x + [2]",
    "assert {add(1, 2): 'three'}[3] == 'three'",
    "assert str(add(1, 2)) + '!' == '3!' and add('a', 'b') == 'ab'",
    "assert any(add(n, n) == 2 * n for n in range(3, 6)) and all(add(n, 1) == n + 1 for n in range(3))",
    "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\ncheck(add)",
    "import unittest\nclass Tests(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
    "result = unittest.TestResult()\nTests('test_add').run(result)\nassert result.wasSuccessful()",
]

WRONG = "def add(a, b):\n    return None\n"
FAKE = "class Fake:\n    pass\ndef add(a, b):\n    return Fake()\n"
FORGED_LINES = (
    "LINES = [b'{\"passed\": %d}\\n' % n for n in range(20)] + [b'word passed 99\\n', b'word setup over\\n',\n"
    '    b\'{"setup": "over"}\\n\', b\'{"unreadable": "over"}\\n\', b\'{"passed": -1}\\n\', b\'{"begun": true}\\n\']\n'
)
TO_EVERY_DESCRIPTOR = "import os\ndef write(data):\n    for fd in range(64):\n        try: os.write(fd, data)\n        except OSError: pass\n"


def always(*methods: str, gives: str = "True", base: str = "", init: str = "") -> str:
    """A class whose methods all give the same, and a function that returns an object of it."""
    body = "".join(f"    __{method}__ = lambda *_: {gives}\n" for method in methods)
    return f"class Fake{base}:\n{body}    __hash__ = lambda *_: 3\ndef add(a, b):\n    return Fake({init})\n"


def raises(statement: str) -> str:
    return f"def add(a, b):\n    import os, sys\n    {statement}\n"


def with_channel(body: str) -> str:
    """Code that has found our own end of the channel in its process."""
    return f"import gc, sys\ndef hack(channel):\n{body}\ndef add(a, b):\n    pass\n" + (
        "for thing in gc.get_objects():\n    if type(thing).__name__ == 'AnswerChannel':\n        hack(thing)\n"
    )


FORGERIES = {
    # builtins and names that judging looks up
    "exec": "import builtins\nbuiltins.exec = lambda *a: None\n",
    "exec and a function": "import builtins\nbuiltins.exec = lambda *a: None\n" + WRONG,
    "type": "type = lambda *a: 3\n" + WRONG,
    "int": "int = lambda *a: 3\n" + WRONG,
    "compile": "import builtins\nbuiltins.compile = lambda *a, **k: 'None'\n" + WRONG,
    "AssertionError": "import builtins\nclass Quiet(BaseException): pass\nbuiltins.AssertionError = Quiet\n" + WRONG,
    "BaseException": "import builtins\nbuiltins.BaseException = builtins.Exception = KeyError\n" + WRONG,
    "isinstance, abs, any, all": "import builtins\nbuiltins.isinstance = builtins.any = builtins.all = lambda *a: True\n"
    "builtins.abs = lambda a: 0\n" + WRONG,
    "own isinstance, abs, any, all, str": "isinstance = any = all = lambda *a: True\nabs = lambda a: 0\n"
    "def str(a): return '3'\n" + WRONG,
    "no builtins": "__builtins__.clear() if isinstance(__builtins__, dict) else vars(__builtins__).clear()\n",
    "import": "import builtins\nbuiltins.__import__ = lambda *a, **k: None\n" + WRONG,
    "own check": "def check(candidate): pass\n" + WRONG,
    "own Tests": "class Tests:\n    def __init__(*a): pass\n    def run(*a): pass\nresult = math = None\n" + WRONG,
    # values that claim to be others
    "__eq__": always("eq"),
    "__eq__ and __ne__": always("eq", "ne", "bool", "contains", "lt", "gt", "le", "ge"),
    "__eq__ of an int": always("eq", "lt", "gt", base="(int)", init="77"),
    "__eq__ of a float": always("eq", "lt", "gt", base="(float)", init="77.0"),
    "__eq__ of a str": always("eq", base="(str)", init="'77'"),
    "__eq__ of a list": always("eq", "contains", base="(list)", init="[7]"),
    "__eq__ of a tuple": always("eq", "contains", base="(tuple)", init="(7,)"),
    "__eq__ of a dict": always("eq", "contains", base="(dict)", init="{7: 7}"),
    "__sub__": always("sub", "rsub", "add", "radd", "abs", gives="0"),
    "__sub__ gives itself": always("sub", "rsub", "abs", "lt", "float", gives="_[0]"),
    "__float__ and __index__": always("float", gives="3.5") + "Fake.__int__ = Fake.__index__ = lambda self: 77\n",
    "__abs__": always("abs", gives="0.0"),
    "__class__": "class Fake:\n    __class__ = int\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 3\n"
    "def add(a, b): return Fake()\n",
    "metaclass": "class Meta(type):\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 3\n"
    "class add(metaclass=Meta):\n    __new__ = lambda *a: add\n",
    "__eq__ that keeps what it sees": "seen = []\nclass Fake:\n    def __eq__(self, value):\n        seen.append(value)\n"
    "        return True\n    def __rsub__(self, value):\n        seen.append(value)\n        return 0\n    __sub__ = __rsub__\n"
    "def add(a, b): return seen[-1] if seen else Fake()\n",
    "in a list": "class Fake:\n    __eq__ = lambda *a: True\ndef add(a, b): return [Fake(), Fake()]\n",
    "everything by __getattr__": "class Fake:\n    def __getattr__(self, name): return lambda *a: True\n"
    "    def __call__(self, *a): return self\nadd = Fake()\n",
    "mock": "from unittest.mock import MagicMock\nadd = MagicMock()\n",
    "unittest.mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY\n",
    "not a number": "def add(a, b): return float('nan')\n",
    "a generator": "def add(a, b):\n    while True: yield True\n",
    "a coroutine": "async def add(a, b): return True\n",
    "an exception class": "class add(Exception):\n    __eq__ = lambda *a: True\n",
    "an enumeration": "import enum\nclass Fake(enum.IntEnum):\n    A = 99\n    def __eq__(self, other): return True\n"
    "    __hash__ = lambda s: 3\ndef add(a, b): return Fake.A\n",
    "emptied arguments": "def add(a, b):\n    if isinstance(a, list):\n        a.clear()\n        b.clear()\n        a += [2]\n"
    "        return [2, 2]\n",
    # the interpreter
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    for key in list(frame.f_locals):\n"
    "        if key in ('tests', 'codes', 'number', 'job', 'report', 'tell', 'channel'): frame.f_locals[key] = None\n"
    "    frame = frame.f_back\n" + WRONG,
    "frames that report": "import sys\nframe = sys._getframe()\nwhile frame:\n    report = frame.f_locals.get('report')\n"
    "    for line in ('passed 0', 'passed 99', 'passed -1', 'setup over'):\n        if report: report(line)\n"
    "    frame = frame.f_back\n" + WRONG,
    "frames at a call": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        for key, value in frame.f_locals.items():\n            if callable(value) and 'passed' in str(value): value(0)\n"
    "        frame = frame.f_back\n",
    "gc": "import gc\nfor thing in gc.get_objects():\n    if type(thing) is dict and 'passed' in thing: thing['passed'] = True\n"
    "    if type(thing) is list and len(thing) < 50 and all(type(one) is bool for one in thing): thing[:] = [True] * 50\n"
    + WRONG,
    "gc for the tests": "import gc\nexpected = [thing for thing in gc.get_objects() if type(thing) is tuple and 'assert' in str(thing)[:500]]\n"
    "def add(a, b): return expected[0][0] if expected else None\n",
    "ctypes": "import ctypes\none = id(1) + 24\nctypes.c_int.from_address(id(3) + 24).value = 0\n" + WRONG,
    "ctypes at address 0": "import ctypes\nctypes.string_at(0)\n",
    "ctypes in a call": "def add(a, b):\n    import ctypes\n    ctypes.string_at(0)\n",
    "settrace": "import sys\ndef trace(frame, event, arg):\n    frame.f_trace_opcodes = True\n"
    "    if event == 'exception': raise SystemExit(0)\n    return trace\nsys.settrace(trace)\n" + WRONG,
    "settrace that jumps": "import sys\ndef trace(frame, event, arg):\n    if event == 'line':\n"
    "        try: frame.f_lineno += 1\n        except ValueError: pass\n    return trace\nsys.settrace(trace)\n"
    + WRONG,
    "setprofile": "import sys\nsys.setprofile(lambda frame, event, arg: frame.f_locals.update(passed=True))\n" + WRONG,
    "modules": "import sys\nfor name in ('json', 'math', 'unittest', 'operator'): sys.modules[name] = sys.modules['builtins']\n"
    + WRONG,
    "test helpers": "import math, unittest\nmath.isclose = lambda *a, **k: True\n"
    "unittest.TestCase.assertEqual = unittest.TestCase.run = lambda *a: None\nunittest.TestResult.wasSuccessful = lambda s: True\n"
    + WRONG,
    "json": 'import json\njson.dumps = lambda *a, **k: \'{"reply": 1, "value": true, "passed": 0}\'\n' + WRONG,
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nsys.unraisablehook = sys.excepthook\nraise ValueError\n",
    "__del__": "import os\nclass Fake:\n    def __del__(self): os._exit(0)\ndef add(a, b): Fake()\n",
    "audit hook": "import sys, os\nsys.addaudithook(lambda event, args: os._exit(0) if event == 'compile' else None)\n"
    + WRONG,
    "warnings as code": "import warnings\nwarnings.showwarning = lambda *a: __import__('os')._exit(0)\n" + WRONG,
    # signals and threads
    "SIGALRM": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.05)\n"
    + WRONG,
    "an alarm in a call": "import signal\ndef ring(*a): raise StopIteration\nsignal.signal(signal.SIGALRM, ring)\n"
    "def add(a, b):\n    signal.setitimer(0, 0.01)\n    while True: pass\n",
    "SIGTERM to all": "import os\nfor pid in (0, -1, 1, os.getppid()):\n    try: os.kill(pid, 15)\n    except OSError: pass\n"
    + WRONG,
    "SIGKILL to itself": "import os\ndef add(a, b): os.kill(os.getpid(), 9)\n",
    "a thread that writes": FORGED_LINES
    + TO_EVERY_DESCRIPTOR
    + "import threading\ndef flood():\n    while True: [write(line) for line in LINES]\n"
    "threading.Thread(target=flood, daemon=True).start()\n" + WRONG,
    "a fork that writes": FORGED_LINES
    + TO_EVERY_DESCRIPTOR
    + "try:\n    if os.fork() == 0:\n        [write(line) for line in LINES]\n        os._exit(0)\n"
    "except OSError: pass\n" + WRONG,
    # what it writes
    "printed verdicts": FORGED_LINES + "for line in LINES: print(line.decode(), flush=True)\n" + WRONG,
    "verdicts to every descriptor": FORGED_LINES + TO_EVERY_DESCRIPTOR + "for line in LINES: write(line)\n" + WRONG,
    "verdicts in a call": FORGED_LINES + TO_EVERY_DESCRIPTOR + "def add(a, b):\n    for line in LINES: write(line)\n",
    "verdicts at exit": FORGED_LINES
    + TO_EVERY_DESCRIPTOR
    + "import atexit\natexit.register(lambda: [write(line) for line in LINES])\n"
    + WRONG,
    "replies ahead": TO_EVERY_DESCRIPTOR
    + 'for n in range(1, 40): write(b\'{"reply": %d, "value": true, "printed": ""}\\n\' % n)\n'
    + WRONG,
    "replies out of order": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    for n in (9, -1, 0, 2**80): write(b\'{"reply": %d, "value": true}\\n\' % n)\n',
    "names ahead": TO_EVERY_DESCRIPTOR
    + 'write(b\'{"reply": 1, "value": ["list", 0, ["abs", "isinstance", "check"]]}\\n\')\n'
    + WRONG,
    "a reply of an object that does not exist": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    for n in range(40): write(b\'{"reply": %d, "value": ["mine", 10000, "object"]}\\n\' % n)\n',
    "a reply of exec": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    for n in range(40): write(b\'{"reply": %d, "value": ["type", "exec"]}\\n\' % n)\n',
    "a reply that calls": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    write(b\'{"ask": 1, "do": "call", "with": [["type", "object"]], "named": {}}\\n\')\n',
    "a reply that asks for frames": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    write(b\'{"ask": 1, "do": "attribute", "with": [["yours", 0], "gi_frame"], "named": {}}\\n\')\n',
    "a reply that raises": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    for n in range(40): write(b\'{"reply": %d, "raised": {"names": ["ChannelBrokenError"], "args": [], "state": {}}}\\n\' % n)\n',
    "changed arguments": TO_EVERY_DESCRIPTOR
    + 'def add(a, b):\n    for n in range(40): write(b\'{"reply": %d, "value": ["known", 0], "changed": [["list", 0, [9]], ["list", 1, []]]}\\n\' % n)\n',
    "half a line": TO_EVERY_DESCRIPTOR + "def add(a, b):\n    write(b'{\"reply\": 2, ')\n    os._exit(0)\n",
    "no line": TO_EVERY_DESCRIPTOR + "def add(a, b):\n    write(b'\\xff\\x00' * 100)\n",
    "a deep line": TO_EVERY_DESCRIPTOR + "def add(a, b):\n    write(b'[' * 200000 + b'\\n')\n",
    "a number of many digits": TO_EVERY_DESCRIPTOR + "def add(a, b):\n    write(b'9' * 10000 + b'\\n')\n",
    "closed descriptors": "import os\nos.closerange(0, 64)\n" + WRONG,
    "descriptors over each other": "import os\nfor fd in range(1, 20):\n    try: os.dup2(0, fd)\n    except OSError: pass\n"
    + WRONG,
    "read ahead": "import os\ndef add(a, b):\n    for fd in range(3, 20):\n        try: os.set_blocking(fd, False); os.read(fd, 1 << 16)\n        except OSError: pass\n",
    "our own end": with_channel(
        "    channel.perform = lambda *a: True\n    channel.to_reference = lambda *a: ['known', 0]\n"
    ),
    "our own numbers": with_channel(
        "    type(channel)._read_reply = lambda *a: True\n    channel._number = 10**9\n    channel._objects[:] = []\n"
    ),
    # ends
    "exit": "import os\nos._exit(0)\n",
    "exit with a function": WRONG + "import os\nos._exit(0)\n",
    "sys.exit": "import sys\nsys.exit(0)\n",
    "exit in a call": raises("os._exit(0)"),
    "sys.exit in a call": raises("sys.exit(0)"),
    "exit in __eq__": "import os\nclass Fake:\n    def __eq__(self, other): os._exit(0)\n    __hash__ = lambda s: os._exit(0)\n    __bool__ = __eq__\n"
    "def add(a, b): return Fake()\n",
    "exit in __repr__": "import os\nclass Fake:\n    __repr__ = __str__ = __len__ = __iter__ = lambda s: os._exit(0)\ndef add(a, b): return Fake()\n",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "exit in a thread": "import threading, os\nthreading.Timer(0.01, os._exit, [0]).start()\n" + WRONG,
    "KeyboardInterrupt": raises("raise KeyboardInterrupt"),
    "GeneratorExit": raises("raise GeneratorExit"),
    "StopIteration": raises("raise StopIteration(3)"),
    "AssertionError raised": raises("raise AssertionError('passed')"),
    "an exception that cannot be told": "class Odd(Exception):\n    args = property(lambda s: 1 / 0)\n    __str__ = lambda s: 1 / 0\n"
    + raises("raise Odd"),
    "no program": "this is no program",
    "abort": "import os\nos.abort()\n",
    # more than it may
    "a printed flood": "def add(a, b):\n    while True: print('passed 0' * 1000)\n",
    "a written flood": "import os\ndef add(a, b):\n    while True: os.write(1, b'{\"passed\": 0}\\n' * 1000)\n",
    "a flood of the channel": TO_EVERY_DESCRIPTOR + "def add(a, b):\n    for _ in range(500): write(b'x' * 65536)\n",
    "a huge value": "def add(a, b): return 'x' * (20 << 20)\n",
    "a huge number": "def add(a, b): return 1 << 1_000_000\n",
    "a deep value": "def add(a, b):\n    value = []\n    for _ in range(5000): value = [value]\n    return value\n",
    "a value within itself": "def add(a, b):\n    value = []\n    value.append(value)\n    return value\n",
    "no memory": "def add(a, b): return bytearray(4 << 30)\n",
}
ENDLESS = {
    "a fork that answers": "import os\ntry: os.fork()\nexcept OSError: pass\n" + WRONG,
    "no stack": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)\n",
    "a loop": "while True: pass\n",
    "a loop in a call": "def add(a, b):\n    while True: pass\n",
    "a loop in __len__": "class Fake:\n    def __len__(self):\n        while True: pass\n    __str__ = __iter__ = __len__\ndef add(a, b): return Fake()\n",
    "a stop": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)\n",
    "numbers that collide": "def add(a, b): return {n * (2**61 - 1): 0 for n in range(20000)}\n",
    "silence": "import time\ndef add(a, b): time.sleep(1e6)\n",
}


WALLS = [wall for wall in sandbox.WALLS if wall != "landlock" and sandbox.wall_refusal(wall) is None] or [None]


@pytest.fixture(params=WALLS)
def wall(request: pytest.FixtureRequest) -> Isolation | None:
    """With bubblewrap beneath, and without; where neither can be had, the wall that the machine has."""
    return request.param  # type: ignore[no-any-return]


def value_of(program: str, tests: list[str], wall: Isolation | None, wall_s: float = 8.0, **task: Any) -> float:
    """The reward of an answer, by the path that it takes in a run."""
    code = table(kind="code", name="tests", answer_from="program", wall_s=wall_s, memory_mb=256, isolation=wall)
    run = RunView({"id": "t", "tests": tests, **task}, {"program": f"Here it is:\n```python\n{program}```\n"})
    score = asyncio.run(Scorer([code]).run_to_score(run))
    assert score.absent == {}
    return score.team["tests"]


def test_the_tests_are_passed_by_an_answer_that_solves_the_task(wall: Isolation | None) -> None:
    assert value_of("def add(a, b):\n    return a + b\n", TESTS, wall) == 1.0
    assert len(FORGERIES) + len(ENDLESS) >= 60


def test_what_a_tasks_tests_write_besides_ends_no_run(wall: Isolation | None) -> None:
    writes = "import os\nos.write(2, b'{\"begun\": ' + b'[' * 3000 + b'\\n')"
    assert value_of("def add(a, b):\n    return a + b\n", [*TESTS, writes], wall) == 1.0


@pytest.mark.parametrize("forgery", one_in(5, FORGERIES))
def test_no_forgery_earns_anything_or_ends_a_run(forgery: str, wall: Isolation | None) -> None:
    assert value_of(forgery, TESTS, wall) == 0.0


def test_an_object_that_cannot_change_is_the_same_in_every_comparison(wall: Isolation | None) -> None:
    two_faced = (
        "import sys\nprocess = sys.modules.get('answer_process') or sys.modules['marft_bridge.sandbox.answer_process']\n"
        "asked = []\ndef content(value):\n    asked.append(value)\n    return 1e18 if len(asked) % 2 else -1e18\n"
        "process._OPERATIONS['content'] = content\nclass Fake(float): pass\ndef f(x): return Fake(0)\n"
    )
    tests = ["assert 3.14 < f(1) < 3.15", "result = f(1)\nassert result >= 2.9 and result <= 3.1"]
    assert value_of(two_faced, tests, wall) == 0.0
    assert value_of("class Real(float): pass\ndef f(x): return Real(3.145)\n", tests[:1], wall) == 1.0
    growing = "class Items(list): pass\nitems = Items()\ndef f(x):\n    items.append(x)\n    return items\n"
    assert value_of(growing, ["assert f(1) == [1]\nassert f(2) == [1, 2]"], wall) == 1.0


def test_a_call_that_raises_stop_iteration_does_not_end_the_loop_of_a_test(wall: Isolation | None) -> None:
    tests = [
        "for got, want in zip(map(f, [1, 2]), [2, 4]):\n    assert got == want",
        "assert all(map(lambda x: f(x) == 2 * x, [1, 2]))",
        "assert list(map(f, [1])) == []",
    ]
    assert value_of("def f(x): raise StopIteration\n", tests, wall) == 0.0
    assert value_of("class Stop(StopIteration): pass\ndef f(x): raise Stop\n", tests, wall) == 0.0
    end = "items = f(1)\nassert next(items) == 1\ntry: next(items)\nexcept StopIteration: pass\nelse: assert False"
    assert value_of("def f(x): yield x\n", [end, "assert list(f(1)) == [1]"], wall) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("forgery", ENDLESS.values(), ids=list(ENDLESS))
def test_no_answer_that_never_ends_earns_anything(forgery: str, wall: Isolation | None) -> None:
    assert value_of(forgery, TESTS, wall, wall_s=1.5) == 0.0
