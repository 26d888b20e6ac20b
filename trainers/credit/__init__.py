"""A round of episodes to advantages: critics, returns, and who is told what."""
