"""A machine's cards, models and options -> who computes on which card, and how much of its memory each may take."""
