"""The clients that are known, patched: the one place that recording and rollouts use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from marft_bridge.model_calls.clients.litellm_hooks import patch_litellm
from marft_bridge.model_calls.clients.patches import Patches
from marft_bridge.model_calls.clients.sdk_hooks import patch_sdk

client_patches = Patches({"openai": patch_sdk, "anthropic": patch_sdk, "litellm": patch_litellm})


@contextmanager
def redirected_clients() -> Iterator[None]:
    """While the block runs, episodes whose routing names a `chat` have calls of these clients redirected."""
    client_patches.attach(redirects=True)
    try:
        yield
    finally:
        client_patches.detach(redirects=True)
