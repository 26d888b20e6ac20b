"""A function that runs event loops of its own -> its result, also where it is called inside a running loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def call_without_loop(function: Callable[[], _Result]) -> _Result:
    """Calls `function` here; in a thread of its own, in this context, where an event loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(call,))
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
