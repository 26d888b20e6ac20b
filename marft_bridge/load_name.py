"""A name in the configuration -> the Python object that it means.

A name is `package.module:attribute` or `path/file.py:attribute`. Invariant: whatever is wrong with it (an import, a
missing attribute) is a `GraphError` of one line that names the configuration key.
It does not know what the object is for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from marft_bridge.errors import GraphError


def load_name(name: str, key: str) -> Any:
    """The object called `name`; `key` is the configuration key that names it, for the message.

    Raises:
        GraphError: the name has another form, does not import, or the module has no such attribute.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise GraphError(
            f"{key}: {name!r} is not a name of the form package.module:attribute or path/file.py:attribute"
        )
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except GraphError as error:
        raise GraphError(f"{key}: {error}") from None
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise GraphError(f"{key}: importing {module_name!r} failed: {why}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = ", ".join(sorted(word for word in vars(module) if not word.startswith("_"))[:20])
            raise GraphError(f"{key}: {module_name!r} has no {attribute!r}; it has: {public}")
        found = getattr(found, part)
    return found


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look in the working directory by itself
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise GraphError(f"there is no file {str(path)!r}")
    name = f"_marft_app_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a spec,
    assert spec.loader is not None  # and a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
