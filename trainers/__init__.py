"""The MARFT trainer: trajectories in, adapters out. It never sees spans, LangGraph or vLLM.

`MarftTrainer` is imported on first use, so that reading a configuration does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.config import TrainerOptions
    from trainers.marft import MarftTrainer

__all__ = ["MarftTrainer", "TrainerOptions"]


def __getattr__(name: str) -> Any:
    if name == "MarftTrainer":
        from trainers.marft import MarftTrainer

        return MarftTrainer
    if name == "TrainerOptions":
        from trainers.config import TrainerOptions

        return TrainerOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
