"""`marft-bridge view`: a run folder or store -> its pages, served on loopback until Ctrl-C.

Invariants: the access token is made anew each time and printed once; the address that a browser is started with, which
other users of this machine may see in the process list, works once; when the command returns, nothing listens any more.
"""

from __future__ import annotations

import secrets
import time
import webbrowser
from contextlib import closing, suppress
from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import is_installed, missing_module_to_line
from marft_bridge.common.hub_names import model_to_directory
from marft_bridge.common.progress import Reporter
from marft_bridge.view.source import path_to_source

CHECK_EVERY_S = 0.5


def view(path: Path, port: int, model: str | None, browser: bool, reporter: Reporter) -> None:
    """Serves the pages of a run folder or a store, and opens a browser if `browser`.

    Args:
        port: 0 takes a free one.
        model: the base model, a directory or Hub name, whose tokenizer gives the token texts; None: as bridge.json
            says.

    Raises:
        ConfigError: there is no store or no such model, the port is taken, or `model` can give no texts.
        StoreError: the store cannot be opened.
    """
    source = path_to_source(path)
    tokenizer = None if model is None else model_to_directory(model) / "tokenizer.json"
    if tokenizer is not None and not tokenizer.is_file():
        raise ConfigError(f"view: there is no {tokenizer}; --model names the directory of the base model")
    if tokenizer is not None and not is_installed("tokenizers"):
        raise ConfigError(f"view: --model has no effect: {missing_module_to_line('tokenizers')}, or that package alone")
    from marft_bridge.view.pages import Pages
    from marft_bridge.view.web import pages_to_server

    token, one_time_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    pages = Pages(source, tokenizer)
    pages.refuse_unreadable_store()
    server = pages_to_server(pages, port, token, one_time_token=one_time_token if browser else None)
    with suppress(KeyboardInterrupt), closing(pages), server:
        address = f"{server.url}/?token="
        reporter.say(f"looking at {source.name}; Ctrl-C ends it")
        reporter.say(f"open {address}{token}")
        if browser:
            webbrowser.open(address + one_time_token)
        while True:
            time.sleep(CHECK_EVERY_S)
            server.check()
