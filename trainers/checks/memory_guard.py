"""A memory plan and what is free -> go on, or one line that says which options to change, and to what.

Invariant: nothing is refused where the plan or what is free is not known. What the model server takes counts as taken
once it runs. Several processes look at the same moment, each for its share. It knows nothing of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from trainers.adapters.adapter_map import AdapterPlan, options_to_adapters
from trainers.batch import ActionItem
from trainers.checks.memory_plan import Base, Calls, MemoryPlan, model_to_shape, plan_memory, weights_to_bytes
from trainers.common.byte_text import bytes_to_text
from trainers.common.free_memory import free_bytes, leaves_holes
from trainers.common.workers import losses_told
from trainers.config import TrainerOptions
from trainers.errors import TrainError

P = ParamSpec("P")
X = TypeVar("X")

_SAVE = "set train.trainer.system.activation_checkpointing = true"
_STEP = 64  # suggested budgets are multiples of it, and it is the smallest budget


class MemoryGuard:
    """What training these adapters takes, held against what is free.

    Args:
        adapters: by name, see `options_to_adapters`.
        device: where the models will be.
        free: what is free on it; None asks the machine.
        sharers: processes that take as much each of what is free, this one among them: on the CPU of one memory, else
            each of its own card's.
        learners: processes that train together, over which `system.shard_base` deals layers out.
        meet: returns once all processes that train together have called it. None of them takes memory between the
            first meeting of `check`, `expect` or `check_teacher` and the second, so that each sees all that is free.
    """

    def __init__(
        self,
        options: TrainerOptions,
        adapters: Mapping[str, AdapterPlan],
        device: torch.device,
        free: Callable[[torch.device], int | None] | None = None,
        *,
        sharers: int = 1,
        learners: int = 1,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.options, self.device, self._free = options, device, free or free_bytes
        self._sharers, self._learners, self._meet = sharers, learners, meet
        self._bases: list[Base] | None = []
        for model_dir in dict.fromkeys(plan.model_dir for plan in adapters.values()):
            base_plans = [plan for plan in adapters.values() if plan.model_dir == model_dir]
            shape = model_to_shape(model_dir, options.lora)
            if shape is None:
                self._bases = None
                break
            frozen = sum(plan.frozen for plan in base_plans)
            self._bases.append(Base(shape, len(base_plans) - frozen, frozen))
        self._calls, self._checked, self._loaded = Calls(), 0, False

    @classmethod
    def of_agents(
        cls,
        options: TrainerOptions,
        model_dir: Path | Mapping[str, Path],
        agents: Sequence[str],
        *,
        sharers: int = 1,
        learners: int = 1,
    ) -> MemoryGuard:
        """For agents on one base model, or on one each, before there is a trainer.

        Args:
            sharers: learners that will hold as much each, on this machine.
            learners: all of them.
        """
        adapters = options_to_adapters(options, agents, model_dir)
        return cls(options, adapters, options_to_device(options), sharers=sharers, learners=learners)

    def plan(self) -> MemoryPlan | None:
        """With what is known of the calls; None for architectures without an estimate."""
        return self._plan(self.options)

    def check(self) -> None:
        """Refuses to load what will not fit.

        Raises:
            TrainError: more is needed than is free.
        """
        self._check(self._share_at_once())

    def _check(self, free: int | None) -> None:
        plan = self.plan()
        if plan is None or free is None:
            return
        self._checked = plan.total
        loaded_bytes = plan.loaded if self._loaded else 0
        if self._total(self.options) - loaded_bytes > free:
            raise TrainError(
                f"training needs about {bytes_to_text(self._total(self.options))} of memory ({plan}), and "
                f"{bytes_to_text(free + loaded_bytes)} are there for it: {self.advice(free + loaded_bytes)}"
            )

    def check_teacher(self, model_dir: Path) -> None:
        """Refuses a teacher whose weights do not fit beside what training has loaded, or is about to load.

        Raises:
            TrainError: more is needed than is free.
        """
        shape, free = model_to_shape(model_dir, self.options.lora), self._share_at_once()
        plan = self.plan()
        if shape is None or free is None or plan is None:
            return
        needed, room = weights_to_bytes(shape, self.device.type), free - (0 if self._loaded else plan.loaded)
        if needed > room:
            raise TrainError(
                f"the teacher {model_dir} takes about {bytes_to_text(needed)} of memory, and beside the models that "
                f"are trained {bytes_to_text(max(0, room))} are there for it: free memory, or name a smaller teacher"
            )

    def expect(self, items: Sequence[ActionItem]) -> None:
        """Takes note of calls that are to be learned from, and checks again where they ask for a good deal more.

        Memory that this process has used and freed may still count as taken, so a little more is let through.

        Raises:
            TrainError: more is needed than is free.
        """
        longest = max((len(item.prompt_ids) + len(item.sampled_ids) - 1 for item in items), default=0)
        by_token = self.options.granularity == "token"
        observed = sum(len(item.decided) for item in items) if by_token else len(items)
        self._calls = Calls(max(self._calls.longest, longest), max(self._calls.observed, observed))
        free = self._share_at_once()  # also where this process does not need it: another one may, and all must meet
        plan = self.plan()
        if plan is not None and plan.total > 1.05 * self._checked:
            self._check(free)

    def loaded(self) -> None:
        """The models are in memory now, so that what they take is no longer free."""
        self._loaded = True

    def describe(self) -> str | None:
        """One line on what training takes and what is free; None where there is no estimate."""
        plan, free = self.plan(), self._share()
        if plan is None:
            return None
        free_text = "" if free is None else f"; {bytes_to_text(free)} are free"
        passes = f"{self.options.system.tokens_per_microbatch} tokens at a time"
        return f"memory: training takes about {bytes_to_text(self._total(self.options))}, {passes} ({plan}){free_text}"

    def _share(self) -> int | None:
        """What is free for this process: its share of a memory that several take from."""
        free = self._free(self.device)
        return free if free is None or self.device.type != "cpu" else free // self._sharers

    def _share_at_once(self) -> int | None:
        """The same, seen by all processes while none of them takes any."""
        self._meet()
        free = self._share()
        self._meet()
        return free

    def _plan(self, options: TrainerOptions) -> MemoryPlan | None:
        if self._bases is None:
            return None
        return plan_memory(
            options,
            self._bases,
            self._calls,
            device=self.device.type,
            leaves_holes=leaves_holes(),
            learners=self._learners,
        )

    def _total(self, options: TrainerOptions) -> int:
        """What must fit on the device; features are in host memory."""
        plan = self._plan(options)
        assert plan is not None
        return plan.total - (plan.features if self.device.type == "cuda" else 0)

    def advice(self, room: int) -> str:
        """What to change so that training fits into `room` bytes."""
        plain, saving = (_with(self.options, activation_checkpointing=checkpointing) for checkpointing in (False, True))
        least = self._largest(saving, room)
        if least is None:
            longer = self._calls.longest > self.options.system.tokens_per_microbatch
            smaller = f"free memory, take a smaller base model{' or shorter calls' if longer else ''}"
            return smaller + self._advice_of_smaller_bases(room)
        if self.options.system.activation_checkpointing:
            return f"set train.trainer.system.tokens_per_microbatch to {least} or less"
        largest = self._largest(plain, room)
        if largest is None:
            return f"{_SAVE} and train.trainer.system.tokens_per_microbatch to {least} or less"
        fits = f", or {_SAVE.removeprefix('set ')}" if self._total(saving) <= room else ""
        return f"set train.trainer.system.tokens_per_microbatch to {largest} or less{fits}"

    def _advice_of_smaller_bases(self, room: int) -> str:
        """What else makes training fit, or nothing."""
        system = self.options.system
        if system.load_in_4bit or system.shard_base:
            return ""
        options = ["shard_base"] if self._learners > 1 else []
        options += ["load_in_4bit"] if self.device.type == "cuda" else []
        advice = ""
        for option in options:
            largest = self._largest(_with(self.options, activation_checkpointing=True, **{option: True}), room)
            if largest is not None:
                fewer = largest < system.tokens_per_microbatch
                advice += f", or set train.trainer.system.{option} and activation_checkpointing to true"
                advice += f", tokens_per_microbatch to {largest} or less" if fewer else ""
        return advice

    def _largest(self, options: TrainerOptions, room: int) -> int | None:
        """The largest budget, up to today's, with which training fits into `room` bytes."""

        def fits(steps: int) -> bool:
            budget = min(steps * _STEP, self.options.system.tokens_per_microbatch)
            return self._total(_with(options, tokens_per_microbatch=budget)) <= room

        low, high = 0, -(-self.options.system.tokens_per_microbatch // _STEP)  # `low` steps fit, or are none
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return min(low * _STEP, self.options.system.tokens_per_microbatch) or None


def _with(options: TrainerOptions, **system: Any) -> TrainerOptions:
    """The options with other values in their group `system`."""
    return options.model_copy(update={"system": options.system.model_copy(update=system)})


def options_to_device(options: TrainerOptions) -> torch.device:
    """Where one process computes.

    Raises:
        TrainError: CUDA is asked for and there is none, or not this card.
    """
    wanted, has_cards = options.system.device, torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_cards):
        return torch.device("cpu")
    if not has_cards:
        raise TrainError(
            f"train.trainer.system.device is {wanted!r} but torch sees no CUDA device: use 'cpu' or 'auto'"
        )
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if ":" in wanted and device.index >= torch.cuda.device_count():
        raise TrainError(
            f"train.trainer.system.device is {wanted!r}, but torch sees {torch.cuda.device_count()} CUDA devices: "
            f"use 'cuda:0' to 'cuda:{torch.cuda.device_count() - 1}'"
        )
    return device


class _Trains(Protocol):
    options: TrainerOptions


S = TypeVar("S", bound=_Trains)


def failures_told(method: Callable[Concatenate[S, P], X]) -> Callable[Concatenate[S, P], X]:
    """A trainer's method to the same one, whose failure to get memory is one line with what to change.

    So is the loss of another process in a pass of a sharded base.
    """

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> X:
        try:
            with losses_told():
                return method(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise TrainError(f"training ran out of memory: {_next_step(self.options)}") from None

    return guarded


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _next_step(options: TrainerOptions) -> str:
    budget = options.system.tokens_per_microbatch
    smaller = f"set train.trainer.system.tokens_per_microbatch to {max(_STEP, budget // 2)}" if budget > _STEP else ""
    saving = "" if options.system.activation_checkpointing else _SAVE
    return " or ".join(filter(None, (smaller, saving))) or "free memory, take a smaller base model or shorter calls"
