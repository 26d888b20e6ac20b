"""A name in the configuration -> the Python object that it means.

Invariant: whatever is wrong with it is a `GraphError` of one line that names the configuration key.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.common.extras import other_trainers
from trace_store.import_name import load_object


def load_name(name: str, key: str) -> Any:
    """The object called `name`; `key` is the configuration key that names it, for the message.

    Raises:
        GraphError: the name has another form, does not import, or the module has no such attribute.
    """
    _give_up_the_name_trainers()
    try:
        return load_object(name)
    except ValueError as error:
        raise GraphError(f"{key}: {error}") from error.__cause__


def _give_up_the_name_trainers() -> None:
    """Lets the app import its own package `trainers`, where its folder has one.

    Ours has been imported by then where a command reads a bridge.toml. What refers to its modules goes on to work, and
    only its name is given up; `train`, which imports more of it later, refuses such a folder (`require_trainer`).
    """
    if other_trainers() is None or not _is_our_trainers(sys.modules.get("trainers")):
        return
    if "trainers.advantages.estimator" in sys.modules:
        sys.modules["trainers.advantages.estimator"].estimators()  # imports each by its name, which ends here
    for module in [name for name in sys.modules if name.partition(".")[0] == "trainers"]:
        del sys.modules[module]
    sys.path.insert(0, str(Path.cwd()))  # before ours, wherever it was


def _is_our_trainers(package: Any) -> bool:
    file = getattr(package, "__file__", None)
    return file is not None and Path(file).parents[1] == Path(__file__).parents[2]
