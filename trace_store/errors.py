"""What can go wrong with a store, as errors whose message is one line for the user."""

from __future__ import annotations


class StoreError(Exception):
    """The store file or its journal cannot be used; the message says what, where and what to do."""
