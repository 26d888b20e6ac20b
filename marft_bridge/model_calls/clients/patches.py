"""Packages of clients -> the same packages with some functions replaced, while somebody records or redirects.

Invariant: everything is restored at the end, or, where another library has replaced it meanwhile, left in place,
inactive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

from marft_bridge.model_calls.clients.import_hook import call_when_imported, cancel_import_calls


class PatchState:
    """Who uses the replaced functions now."""

    def __init__(self) -> None:
        self.user_count = 0
        self.redirecting_count = 0

    @property
    def is_active(self) -> bool:
        """Whether anybody records or redirects."""
        return self.user_count > 0

    @property
    def redirects(self) -> bool:
        """Whether calls of nodes with a route go to the served model."""
        return self.redirecting_count > 0


PatchPackage = Callable[[ModuleType, PatchState], Iterator[Callable[[], None]]]
"""Replaces functions of a package, and yields what restores each."""


class Patches:
    """The packages, by name, and how each is patched."""

    def __init__(self, packages: Mapping[str, PatchPackage]) -> None:
        self._packages = packages
        self._lock = threading.RLock()
        self._state = PatchState()
        self._restorers: list[Callable[[], None]] = []

    def attach(self, *, redirects: bool = False) -> None:
        """Patches the packages, now or when they are imported; calls nest."""
        with self._lock:
            self._state.redirecting_count += redirects
            self._state.user_count += 1
            if self._state.user_count == 1:
                for package in self._packages:
                    call_when_imported(package, self._patch)

    def detach(self, *, redirects: bool = False) -> None:
        """Undoes one `attach`."""
        with self._lock:
            self._state.redirecting_count -= redirects
            self._state.user_count -= 1
            if self._state.user_count == 0:
                cancel_import_calls(self._patch)
                while self._restorers:
                    self._restorers.pop()()

    def _patch(self, package: ModuleType) -> None:
        with self._lock:
            self._restorers += self._packages[package.__name__](package, self._state)
