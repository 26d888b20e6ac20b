"""Rewards: a recorded episode -> named numbers for the team, for a step, for an agent. See docs/rewards.md."""
