"""`marft-bridge view`: a place -> its pages, served on loopback until Ctrl-C.

Invariants: the token is made anew each time and printed once; the address that a browser is started with, which others
on this machine may see, works once; when the command returns, nothing listens any more. What is served is not known
here.
"""

from __future__ import annotations

import secrets
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

from marft_bridge.errors import ConfigError
from marft_bridge.progress import Reporter
from marft_bridge.view.place import path_to_place

LOOK_EVERY_S = 0.5


def view(path: Path, port: int, model: Path | None, browser: bool, reporter: Reporter) -> None:
    """Serves the pages of a run folder or a store, and opens a browser where that is wanted.

    Args:
        port: 0 takes a free one.
        model: the directory of the base model, to read tokens with; None looks where the run's commands found it.

    Raises:
        ConfigError: nothing to look at, a port that is taken, or a package that is missing.
    """
    place = path_to_place(path)
    tokenizer = None if model is None else model / "tokenizer.json"
    if tokenizer is not None and not tokenizer.is_file():
        raise ConfigError(f"view: there is no {tokenizer}; --model names the directory of the base model")
    try:
        from marft_bridge.loopback import ADDRESS
        from marft_bridge.view.pages import Pages
        from marft_bridge.view.running import RunningView
        from marft_bridge.view.web import pages_to_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"view: {error.name} is missing; install the extra `live`") from None
    token, once = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    pages = Pages(place, tokenizer)
    server = RunningView(lambda taken: pages_to_app(pages, taken, token, once if browser else None), port)
    with suppress(KeyboardInterrupt), server:
        address = f"http://{ADDRESS}:{server.port}/?token="
        reporter.say(f"looking at {place.name}; Ctrl-C ends it")
        reporter.say(f"open {address}{token}")
        if browser:
            webbrowser.open(address + once)
        while True:
            time.sleep(LOOK_EVERY_S)
            server.check()
