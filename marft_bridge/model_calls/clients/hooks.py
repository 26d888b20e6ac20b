"""The clients that are known, patched: the one place that recording and rollouts use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from marft_bridge.model_calls.clients.answered_call import Answerer, answering
from marft_bridge.model_calls.clients.litellm_hooks import patch_litellm
from marft_bridge.model_calls.clients.patches import Patches
from marft_bridge.model_calls.clients.sdk_hooks import patch_sdk

client_patches = Patches({"openai": patch_sdk, "anthropic": patch_sdk, "litellm": patch_litellm})


@contextmanager
def clients_answered_by(answerer: Answerer) -> Iterator[None]:
    """While the block runs, `answerer` answers every call of these clients, and none goes out."""
    client_patches.attach()
    try:
        with answering(answerer):
            yield
    finally:
        client_patches.detach()


@contextmanager
def redirected_clients() -> Iterator[None]:
    """While the block runs, episodes whose routing names a `chat` have calls of these clients redirected."""
    client_patches.attach(redirects=True)
    try:
        yield
    finally:
        client_patches.detach(redirects=True)
