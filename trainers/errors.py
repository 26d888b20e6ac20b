"""What can go wrong in training, as errors whose message is one line for the user."""

from __future__ import annotations

from trace_store.errors import UserError


class TrainError(UserError):
    """A model, an adapter or a batch cannot be used; the message says what, where and what to do."""


class LostProcessError(TrainError):
    """Another of the processes that train together has ended, or does not answer."""
