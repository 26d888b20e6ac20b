"""Owns: what an honest answer may be made of, now that its tests run in another process.

- Values of every built-in shape, and of the standard library's usual types, arrive as what they are.
- Classes, generators, callbacks, exceptions, coroutines, changed arguments and printed text work in tests.
- Names mean the answer's where only it can give them, and else what Python, the setup and the tests mean by them.
- What the setup defines judges as the setup has it; its objects pass in both directions.
- What a value of the answer's own class is compared with is not shown to it.
"""

# ruff: noqa: E501 - a program in one line each
from __future__ import annotations

from typing import Any

import pytest

from marft_bridge.rewards.code import run_tests
from marft_bridge.sandbox.programs import Limits


def passed(program: str, tests: list[str], setup: str = "", **more: Any) -> list[bool]:
    return run_tests(program, tests, setup, Limits(wall_s=8.0), None, **more)


GIVE = "def give(text):\n    import collections, datetime, decimal, fractions\n    return eval(text)\n"
VALUES = [
    *(
        "None",
        "True",
        "0",
        "-1",
        "10 ** 400",
        "0.1",
        "-0.0",
        "1e308",
        "float('inf')",
        "1 + 2j",
        "'\\ud800 é \\n'",
        "''",
    ),
    *(
        "b'\\x00\\xff'",
        "bytearray(b'ab')",
        "[]",
        "[1, 2.5, 'a', None]",
        "[[1], [2, [3]]]",
        "()",
        "(1,)",
        "(1, (2, [3]))",
    ),
    *("set()", "{1, 'a', (2, 3)}", "frozenset({1})", "{}", "{1: 'a', (2, 3): [4], None: {}}", "{'a': {'b': {'c': 1}}}"),
    *("range(2, 9, 3)", "{1: 2}.keys()", "{1: 2}.items()", "...", "int", "ValueError", "[True, 1, 1.0]"),
    *("collections.Counter('aab')", "collections.deque([1, 2], maxlen=2)", "collections.OrderedDict(a=1)"),
    *("decimal.Decimal('1.10')", "fractions.Fraction(1, 3)", "datetime.date(2026, 1, 2)"),
    *("datetime.datetime(2026, 1, 2, 3, 4, 5)", "datetime.timedelta(days=1)"),
]


def test_every_plain_value_arrives_as_the_value_that_it_is() -> None:
    imports = "import collections, datetime, decimal, fractions\n"
    tests = [
        f"{imports}want = {value}\nhave = give({value!r})\n"
        f"assert have == want and type(have) is type(want) and str(have) == str(want) or type(want) in (set, frozenset)\n"
        f"assert have == want and give.__name__ == 'give'"
        for value in VALUES
    ]
    outcome = passed(GIVE, tests)
    assert [value for value, is_passed in zip(VALUES, outcome, strict=True) if not is_passed] == []
    wrong = [f"assert give({value!r}) == ['something else']" for value in VALUES]
    assert not any(passed(GIVE, wrong))


def test_types_are_told_apart_where_python_does() -> None:
    tests = [
        "assert give('(1, 2)') == [1, 2]",
        "assert give('[1, 2]') == (1, 2)",
        "assert type(give('True')) is int",
        "assert give('{1: 2}') == {'1': 2}",
        "assert give(\"'1'\") == 1",
        "assert isinstance(give('1.0'), int)",
    ]
    assert passed(GIVE, tests) == [False] * 6


SHAPES: dict[str, tuple[str, list[str]]] = {
    "a class with state": (
        "class Stack:\n    limit = 2\n    def __init__(self, items=()):\n        self.items = list(items)\n"
        "    def push(self, item):\n        if len(self.items) >= self.limit: raise OverflowError('full')\n"
        "        self.items.append(item)\n        return self\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self, n): return self.items[n]\n    def __contains__(self, x): return x in self.items\n"
        "    def __repr__(self): return f'Stack({self.items})'\n    @property\n    def top(self): return self.items[-1]\n"
        "    @classmethod\n    def of(cls, *items): return cls(items)\n    def __enter__(self): return self\n"
        "    def __exit__(self, *a): self.items.clear()\n    def __bool__(self): return bool(self.items)\n"
        "    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items\n"
        "    def __add__(self, other): return Stack(self.items + other.items)\n",
        [
            "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.top == 1 and s.items == [1]",
            "s = Stack([3, 4])\nassert list(s) == [3, 4] and s[0] == 3 and [x + 1 for x in s] == [4, 5] and 3 in s",
            "s = Stack([1, 2])\ntry:\n    s.push(3)\n    assert False\nexcept OverflowError as error:\n    assert str(error) == 'full'",
            "assert repr(Stack.of(1)) == 'Stack([1])' == f'{Stack.of(1)!r}' and isinstance(Stack(), Stack)",
            "assert not isinstance(3, Stack) and not Stack() and Stack([1])",
            "with Stack([1]) as s:\n    assert len(s) == 1\nassert len(s) == 0",
            "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and Stack([1]) + Stack([2]) == Stack([1, 2])",
            "Stack.limit = 3\ns = Stack([1, 2])\ns.push(3)\ns.note = 'mine'\nassert s.note == 'mine' and s.limit == 3",
            "a, b = Stack([1, 2])\nassert (a, b) == (1, 2) and sorted(Stack([2, 1])) == [1, 2] and max(Stack([2, 1])) == 2",
        ],
    ),
    "classes that derive from built-in ones": (
        "import collections, enum\nPoint = collections.namedtuple('Point', 'x y')\nclass Money(float): pass\n"
        "class Names(list):\n    def first(self): return self[0]\nclass Colour(enum.Enum):\n    RED = 1\n    BLUE = 2\n"
        "class Level(enum.IntEnum):\n    LOW = 1\nclass Bag(dict): pass\n",
        [
            "p = Point(1, 2)\nassert p == (1, 2) and p.x == 1 and tuple(p) == (1, 2) and p in [(1, 2)] and (1, 2) == p",
            "assert Money(2.5) == 2.5 and abs(Money(2.5) - 2.4) < 0.2 and round(Money(2.56), 1) == 2.6 and Money(1) < 2",
            "assert float(Money(2)) == 2.0 and Money(1) * 2 == 2 and 2 * Money(1) == 2 and {Money(1)} == {1}",
            "n = Names(['a', 'b'])\nn.append('c')\nassert n.first() == 'a' and n == ['a', 'b', 'c'] and len(n) == 3",
            "assert Colour.RED == Colour(1) and Colour.RED != Colour.BLUE and Colour.RED.value == 1 and Colour['RED'].name == 'RED'",
            "assert Level.LOW == 1 and Level.LOW < 2 and [10, 20][Level.LOW] == 20",
            "b = Bag(a=1)\nassert b == {'a': 1} and b['a'] == 1 and 'a' in b and list(b) == ['a']",
        ],
    ),
    "functions and iterators": (
        "def evens():\n    n = 0\n    while True:\n        yield n\n        n += 2\ndef adder(n): return lambda x: x + n\n"
        "def apply(f, *items, **more): return f(*items, **more)\ndef twice(f):\n    def g(*a): return f(f(*a))\n    return g\n"
        "def total(items): return sum(items)\ndef words(text): return map(str.upper, text.split())\n"
        "def order(items, key): return sorted(items, key=key)\ndef same(x): return x\nasync def later(n): return n + 1\n"
        "async def stream():\n    for n in range(3): yield n\n",
        [
            "import itertools\nassert list(itertools.islice(evens(), 3)) == [0, 2, 4]\ng = evens()\nassert next(g) == 0 and next(g) == 2",
            "assert adder(2)(3) == 5 and list(map(adder(1), [1, 2])) == [2, 3]",
            "assert apply(lambda a, b: a * b, 3, b=4) == 12 and apply(len, 'abc') == 3 and apply(int, '7') == 7",
            "assert twice(lambda x: x + 1)(1) == 3\n@twice\ndef up(x):\n    return x * 2\nassert up(3) == 12",
            "assert total(n for n in range(4)) == 6 and total(iter([1, 2])) == 3 and total(map(int, '12')) == 3",
            "assert list(words('a b')) == ['A', 'B'] and order([3, 1, 2], key=lambda x: -x) == [3, 2, 1]",
            "import asyncio\nassert asyncio.run(later(1)) == 2\nasync def both():\n    return await later(1) + sum(await asyncio.gather(later(2), later(3)))\nassert asyncio.run(both()) == 9",
            "f = lambda: 1\nassert same(f) is f and same(same) is same",
            "class Node:\n    def __init__(self, value): self.value = value\n    def double(self): return self.value * 2\n"
            "n = Node(4)\nassert apply(lambda x: x.double(), n) == 8 and same(n) is n",
            "def fails(x): raise KeyError(x)\ntry:\n    apply(fails, 'a')\n    assert False\nexcept KeyError as error:\n    assert error.args == ('a',)",
        ],
    ),
    "exceptions": (
        "class Broke(ValueError):\n    def __init__(self, need, have):\n        super().__init__(f'{need} > {have}')\n        self.need = need\n"
        "def pay(need, have):\n    if need > have: raise Broke(need, have)\n    return have - need\ndef parse(text): return int(text)\n"
        "def stop(): raise SystemExit(3)\ndef find(d, k): return d[k]\n",
        [
            "try:\n    pay(3, 2)\n    assert False\nexcept Broke as error:\n    assert str(error) == '3 > 2' and error.need == 3",
            "try:\n    pay(3, 2)\nexcept ValueError as error:\n    assert type(error).__name__ == 'Broke'\nelse:\n    assert False",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(Broke): pay(3, 2)\n"
            "        with self.assertRaisesRegex(ValueError, 'invalid literal'): parse('x')\nr = unittest.TestResult()\nT('test').run(r)\nassert r.wasSuccessful(), r",
            "try:\n    stop()\nexcept SystemExit as error:\n    assert error.code == 3",
            "try:\n    find({}, 'k')\nexcept LookupError as error:\n    assert isinstance(error, KeyError) and str(error) == \"'k'\"\nelse:\n    assert 0",
        ],
    ),
    "arguments that it changes": (
        "def sort(items): items.sort()\ndef pop(items): return items.pop()\ndef fill(d, items):\n    d['n'] = len(items)\n    items.append([d])\n"
        "def back(items):\n    items.reverse()\n    return items\ndef clear(x, y):\n    x.clear()\n    return x is y\n"
        "def fail(items):\n    items.append(1)\n    raise ValueError\ndef nest(m):\n    m[0][0] = 9\n    return m[0]\n",
        [
            "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
            "x = [3, 1, 2]\nassert sort(x) is None\nassert x == [1, 2, 3]",
            "x = [1, 2, 3]\nassert [pop(x), pop(x)] == [3, 2]\nassert x == [1]",
            "d, x = {}, [7]\nfill(d, x)\nassert d == {'n': 1} and x[0] == 7 and x[1][0] == {'n': 1}",
            "x = [1, 2]\nassert back(x) == [2, 1]\nassert x == [2, 1]",
            "s = {1, 2}\nassert clear(s, s)\nassert s == set()\nb = bytearray(b'a')\nclear(b, 0)\nassert b == b''",
            "x = []\ntry:\n    fail(x)\nexcept ValueError:\n    assert x == [1]\nelse:\n    assert 0",
            "m = [[1], [2]]\nrow = m[0]\nnest(m)\nassert m == [[9], [2]] and row is m[0] and row == [9]",
            "x = [2, 1]\nif back(x):\n    assert x == [1, 2]\nfor n in range(2):\n    back(x)\nassert x == [1, 2]",
        ],
    ),
    "printed text and globals": (
        "count = 0\nLIMITS = {'a': [1]}\nRESULT = 6 * 7\ndef hello(name): print('hello', name)\n"
        "def step():\n    global count\n    count += 1\n    return count\nif __name__ == '__main__': 1 / 0\n",
        [
            "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    hello('you')\nassert out.getvalue() == 'hello you\\n'",
            "assert RESULT == 42 and LIMITS['a'] == [1]\nstep()\nassert count == 1\nassert step() == 2 and count == 2",
            "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    print('mine')\n    hello('x')\nassert out.getvalue().split() == ['mine', 'hello', 'x']",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), SHAPES.values(), ids=list(SHAPES))
def test_an_honest_answer_of_any_shape_passes_its_tests(program: str, tests: list[str]) -> None:
    outcome = passed(program, tests)
    assert [test for test, is_passed in zip(tests, outcome, strict=True) if not is_passed] == []


def test_a_name_is_the_answers_where_only_it_can_give_it() -> None:
    own_sum = "def sum(a, b): return a * b\n"
    assert passed(own_sum, ["assert sum(3, 4) == 12"]) == [True]  # the tests use no other name
    shadowing = "def sum(x): return 6\ndef items(): return [1, 1]\n"
    assert passed(shadowing, ["assert sum(items()) == 6", "assert sum(items()) == 2"]) == [False, True]
    stub = "def area(r): raise NotImplementedError\n"
    assert passed("def area(r): return 3 * r\n", ["assert area(2) == 6"], stub) == [True]
    assert passed("def area(r): return 3 * r\n", ["assert area(2) == 6"], stub, entry_point="area") == [True]


def test_a_helper_of_the_setup_judges_as_the_setup_has_it() -> None:
    """As HumanEval/32 does: the answer may repeat the helper, or repeat it wrongly."""
    setup = "def poly(xs, x):\n    return sum(c * x ** n for n, c in enumerate(xs))\n"
    tests = ["xs = [-4, 2]\nassert abs(poly(xs, find_zero(xs))) < 1e-4"]
    assert passed("def find_zero(xs): return -xs[0] / xs[1]\n", tests, setup) == [True]
    assert passed("def poly(xs, x): return 0\ndef find_zero(xs): return 7\n", tests, setup) == [False]
    assert passed(f"{setup}def find_zero(xs): return -xs[0] / xs[1] + 0 * poly(xs, 1)\n", tests, setup) == [True]


def test_objects_of_a_class_of_the_setup_pass_in_both_directions() -> None:
    setup = (
        "import enum\nfrom dataclasses import dataclass\nclass Node:\n    def __init__(self, value, rest=None):\n"
        "        self.value, self.rest = value, rest\n@dataclass\nclass Point:\n    x: int\n    y: int = 0\n"
        "class Side(enum.Enum):\n    LEFT = 'l'\n    RIGHT = 'r'\n"
        "def values(node):\n    return [] if node is None else [node.value, *values(node.rest)]\n"
    )
    program = (
        "def turn(node):\n    before = None\n    while node: node.rest, before, node = before, node, node.rest\n    return before\n"
        "def up(p): return Point(p.x + 1, p.y)\ndef move(p): p.x += 5\ndef other(s): return Side.LEFT if s is Side.RIGHT else Side.RIGHT\n"
    )
    tests = [
        "assert values(turn(Node(1, Node(2, Node(3))))) == [3, 2, 1]",
        "assert up(Point(1, 2)) == Point(2, 2)\np = Point(1)\nmove(p)\nassert p == Point(6) and p.x == 6",
        "assert other(Side.LEFT) is Side.RIGHT and other(Side.RIGHT) == Side.LEFT",
    ]
    assert passed(program, tests, setup) == [True, True, True]
    again = setup.replace("class Point:", "class Point:\n    __eq__ = lambda *a: True\n    __hash__ = None")
    assert passed(again + "def up(p): return Point(0, 0)\n", [tests[1]], setup) == [False]


def test_what_the_setup_imports_stays_what_it_is() -> None:
    setup = "from decimal import Decimal\nfrom http import HTTPStatus\nfrom collections import OrderedDict\n"
    program = "def price(): return Decimal('1.5')\ndef status(): return HTTPStatus.OK\n"
    assert passed(program, ["assert price() == Decimal('1.5')", "assert status() == 200"], setup) == [True, True]


def test_a_value_of_a_test_is_not_shown_to_the_answers_own_classes() -> None:
    """It could only be worked out by the answer, so it is not asked for: `==` is false, and the others raise."""
    program = (
        "seen = []\nclass Own:\n    def __eq__(self, v): seen.append(v); return True\n    __lt__ = __sub__ = __mul__ = __contains__ = __eq__\n"
        "    def scale(self, v): return [v]\n    __iter__ = lambda self: iter([1])\ndef give(): return Own()\n"
    )
    tests = [
        "assert give() == 3",
        "give() < 3",
        "give() - 3",
        "3 * give()",
        "assert 3 in give()",
        "assert [3] == [give()]",
    ]
    assert passed(program, [*tests, "assert seen == []", "assert give().scale(3) == [3]", "assert 1 in give()"]) == [
        *[False] * 6,
        *[True] * 3,
    ]


def test_the_process_of_the_answer_holds_no_test_and_nothing_that_one_expects() -> None:
    """It looks through all that its interpreter holds for texts with the marker, which occurs in the tests only."""
    program = (
        "import gc, sys\ndef look(n):\n    marker = ''.join(['mar', 'ker_', '7'])\n    texts = []\n    for thing in gc.get_objects():\n"
        "        parts = list(thing.values()) if type(thing) is dict else thing if type(thing) in (list, tuple, set) else ()\n"
        "        texts += [part for part in parts if type(part) in (str, bytes) and marker in str(part)]\n"
        "    return len(texts)\n"
    )
    marked = ["assert look(1) == 0, 'marker_7'", "marker_7 = 'marker_7'\nassert look('marker_7') > 0"]
    assert passed(program, marked) == [True, True]  # the second gives it the marker: the search does find one


def test_a_setup_that_fails_in_the_answers_process_only_is_the_answers_fault() -> None:
    assert passed("import os; os._exit(0)", ["assert f() == 1"], "import math") == [False]
    assert passed("def f(): return math.floor(1.5)", ["assert f() == 1"], "import math") == [True]
