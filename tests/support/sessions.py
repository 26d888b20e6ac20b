"""A configuration -> a session on its models, for tests that need no more of a command than that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import App, load_app
from marft_bridge.rollouts.session import Session, open_session
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import config_to_versions


@contextmanager
def session_of(
    config: BridgeConfig, folder: RunFolder, reporter: Reporter, app: App | None = None
) -> Iterator[Session]:
    """The app, or that of the configuration, on the models of the configuration."""
    versions = config_to_versions(config, folder.adapters, reporter.say)
    with open_session(config, folder, app or load_app(config), versions, reporter) as session:
        yield session
