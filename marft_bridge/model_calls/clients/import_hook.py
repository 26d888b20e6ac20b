"""A package by name -> a call once it is imported: at once where it is, else right after its import.

So that a package which an app may never use is not imported for it, and one that a node imports when it first runs is
not missed. Invariant: the import itself is left to Python's own finders and loaders.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImport = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and has their loader say when it is done."""

    def __init__(self) -> None:
        self.calls: dict[str, list[OnImport]] = {}
        self._searching = threading.local()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname not in self.calls or getattr(self._searching, "on", False):
            return None
        self._searching.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.on = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _TellingLoader(spec.loader, self)
        return spec


class _TellingLoader(Loader):
    """The loader of another finder, which tells when the module is there."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for call in self._finder.calls.pop(module.__name__, []):
            call(module)


_finder = _Finder()


def call_when_imported(package: str, call: OnImport) -> None:
    """Calls `call` with the package, now or after its import."""
    module = sys.modules.get(package)
    if module is not None:
        call(module)
        return
    _finder.calls.setdefault(package, []).append(call)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def cancel_import_calls(call: OnImport) -> None:
    """Forgets `call` for all packages that were not imported meanwhile."""
    for package in list(_finder.calls):
        remaining_calls = [known for known in _finder.calls[package] if known != call]
        if remaining_calls:
            _finder.calls[package] = remaining_calls
        else:
            del _finder.calls[package]
    if not _finder.calls and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
