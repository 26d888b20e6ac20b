"""How many on-policy rounds are done -> the factor by which every learning rate is multiplied in the next one.

Invariant: the factor depends on nothing but the options and that number, so a resumed run goes on with the same rates;
it lies in [0, 1]. It knows nothing of optimisers.
"""

from __future__ import annotations

import math

from trainers.config import ScheduleOptions


def rate_factor(options: ScheduleOptions, rounds_done: int) -> float:
    """The learning rate's factor in the round that follows `rounds_done` finished ones (0 for the first round).

    With w = `warmup_rounds` and n = `rounds`: (rounds_done + 1) / (w + 1) while rounds_done < w, then 1 at w. From
    there `constant` stays; `linear` and `cosine` come down to `floor`, which they reach after n rounds and keep,

        linear  floor + (1 - floor) (1 - t)              t = (rounds_done - w) / (n - w), at most 1
        cosine  floor + (1 - floor) (1 + cos(pi t)) / 2

    so the last of n rounds still learns, at one step above the floor (SGDR, arXiv 1608.03983, equation 5 without
    restarts; the usual "linear with warm-up").
    """
    warmup = options.warmup_rounds
    if rounds_done < warmup:
        return (rounds_done + 1) / (warmup + 1)
    if options.rounds is None:
        return 1.0
    t = min((rounds_done - warmup) / (options.rounds - warmup), 1.0)
    left = 1 - t if options.kind == "linear" else (1 + math.cos(math.pi * t)) / 2
    return options.floor + (1 - options.floor) * left
