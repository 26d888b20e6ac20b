"""Owns: how code reads here, as far as a program can tell (CONTRIBUTING.md, "How code reads here").

- A name says what it holds: of the names assigned in the four packages, fewer than one in a hundred are words such as
  `found` or `other` alone.
- A call of ours gives at most three arguments by position, and spreads no tuple or list that is written in it.
- Every module opens with a docstring.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from support.floors import PACKAGES
from support.paths import ROOT

# Alone, none of these says what is held.
VAGUE = frozenset(
    re.findall(
        r"\w+",
        """
        about after again all also around ask asked at bag before behind beside beyond board both each elsewhere
        everything found given gone got hand has have heard here hired holder how it its kept known lacking let made
        maybe met more most named nothing of on one other others own place placed places put said say says seen
        shown some somebody standing strange stuff such take taken that their them there these they thing things
        this those told unseen up wanted what whatever where which whole why why_not wish worth wrong
        """,
    )
)
MAX_POSITIONAL = 3


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the four packages by its path in the repository."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def assigned_names(tree: ast.AST) -> Iterator[str]:
    """Every name that a module gives to something: variables, parameters, fields, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def is_vague(name: str) -> bool:
    return name.strip("_").lower() in VAGUE and not (name.startswith("__") and name.endswith("__"))


def own_functions() -> set[str]:
    """Functions and classes of ours that take no list of positional arguments of any length."""
    names: Counter[str] = Counter()
    variadic = set()
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name] += 1
                if node.args.vararg is not None:
                    variadic.add(node.name)
            elif isinstance(node, ast.ClassDef):
                names[node.name] += 1
    return set(names) - variadic


def imported_from_others(tree: ast.AST) -> set[str]:
    """The names that a module imports from packages that are not ours."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] not in PACKAGES
        for alias in node.names
    }


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the last part of what it calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""), node


def test_the_reader_of_names_sees_every_kind() -> None:
    source = (
        "import x as a\n"
        "b: int = 1\n"
        "def c(d, *e, **f):\n"
        "    for g, h in d: self.i = g\n"
        "    with y as j, (k := 1): pass\n"
        "class l: pass\n"
        "try: pass\n"
        "except E as m: pass\n"
        "n = [o for o in b]\n"
        "match b:\n"
        "    case [p, *q]: pass\n"
    )
    assert sorted(set(assigned_names(ast.parse(source)))) == list("abcdefghijklmnopq")


def test_fewer_than_one_name_in_a_hundred_is_vague() -> None:
    names = [name for tree in modules().values() for name in assigned_names(tree)]
    vague = Counter(name for name in names if is_vague(name))
    assert len(names) > 15_000
    assert vague.total() / len(names) < 0.01, vague.most_common(20)


def test_arguments_beyond_three_go_by_name() -> None:
    ours = own_functions()
    wordy = [
        f"{path}:{call.lineno} {name}"
        for path, tree in modules().items()
        for callables in [ours - imported_from_others(tree)]
        for name, call in calls(tree)
        if name in callables and len(call.args) > MAX_POSITIONAL and "super()" not in ast.unparse(call.func)
    ]
    assert wordy == []


def test_no_call_spreads_a_tuple_that_is_written_in_it() -> None:
    spread = [
        f"{path}:{call.lineno}"
        for path, tree in modules().items()
        for _, call in calls(tree)
        if any(isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Tuple | ast.List) for arg in call.args)
    ]
    assert spread == []


def test_every_module_says_what_it_is() -> None:
    assert [path for path, tree in modules().items() if not ast.get_docstring(tree)] == []
