"""The errors of a store, and what they share with those of the other packages: one line for the user."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right; the message is one line that says what, where and what to do.

    The base of what all our packages raise for the user, so that a command line can tell it from a bug.
    """


class StoreError(UserError):
    """The store file or its journal cannot be used; the message says what, where and what to do."""


class NotJsonError(StoreError):
    """A record holds a value that JSON cannot hold: the fault of that record, and not of the disk."""


class StoreBusyError(StoreError):
    """Another process has the store open, so that this one cannot open it now; `lock_holder` names it."""

    def __init__(self, path: object, lock_holder: str) -> None:
        super().__init__(f"store {path} is in use by {lock_holder}; wait until it ends, or stop it")
        self.lock_holder = lock_holder
