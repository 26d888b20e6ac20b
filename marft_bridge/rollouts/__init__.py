"""The user's app on the served models -> recorded, rewarded episodes."""
