"""A name -> the Python object that it means: `package.module:attribute` or `path/file.py:attribute`.

Invariant: whatever is wrong with it (an import, a missing attribute) is a `ValueError` of one line. It does not know
what the object is for. It lies in the lowest package, as the base of all errors does, since all others use it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(name: str) -> Any:
    """The object called `name`.

    Raises:
        ValueError: the name has another form, does not import, or the module has no such attribute.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{name!r} is not a name of the form package.module:attribute or path/file.py:attribute")
    module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = ", ".join(sorted(word for word in vars(module) if not word.startswith("_"))[:20])
            raise ValueError(f"{module_name!r} has no {attribute!r}; it has: {public}")
        target = getattr(target, part)
    return target


def _import_module(name: str) -> ModuleType:
    working_dir = str(Path.cwd())
    if working_dir not in sys.path:  # a console script does not look in the working directory by itself
        sys.path.insert(0, working_dir)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(_failed(name, error)) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
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
    except Exception as error:
        del sys.modules[name]
        raise ValueError(_failed(str(path), error)) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _failed(name: str, error: Exception) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"importing {name!r} failed: {reason}"
