"""Names of the rewards that `marft-bridge credit` writes into the store with level `agent`, for training to use."""

from __future__ import annotations

CREDIT_REWARDS = ("difference", "shapley")
