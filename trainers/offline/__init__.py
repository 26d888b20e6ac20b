"""Stored episodes to better adapters before the first fresh rollout."""
