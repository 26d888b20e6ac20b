"""What each agent contributes to its team: teams with some agents replaced -> shares per agent."""

REWARDS = ("difference", "shapley")
"""What `marft-bridge credit` writes into the store, with level `agent`."""

CREDITS = tuple((name, "agent") for name in REWARDS)
"""Name and level of each."""
