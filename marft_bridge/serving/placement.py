"""A configuration and its base models -> which card each server and the trainer take on this machine.

Here the machine and the models are read; what follows from them is decided by `devices.plan`. Invariant: without cards
that the driver or torch lists, nothing is planned and everything stays as the options say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.serve import PlacedServeOptions, ServeOptions, argument_to_flag, argument_to_value
from marft_bridge.devices.card_memory import EngineNeed, TrainerNeed
from marft_bridge.devices.machine import Machine, ask_torch, has_driver, read_machine
from marft_bridge.devices.plan import DevicePlan, EnginePlan, plan_devices
from marft_bridge.serving.base_models import BaseModelSpec, directory_of, prepare_directory
from marft_bridge.serving.model_config import context_length, read_model_config
from marft_bridge.serving.vllm_arguments import vllm_runs_on_cpu
from trainers.config import TrainerOptions


class Placement:
    """Who takes which card for the commands of one configuration.

    Args:
        options: of each base model's server, in their order; one that attaches takes no card of this command's.
        trains: whether this command trains. Others leave the trainer's share free where it fits, so that a call has
            the same limit in all of them, and go without it where it does not.
        beside_trainer: whether the trainer computes on this machine, now or in another command.
        serves_here: whether the servers are on this machine. Without it they take no card of it.
        takes_turns: whether the command that trains may put these servers to sleep.
        machine: None reads this one.

    Raises:
        ServingError: see `plan_devices`.
    """

    def __init__(
        self,
        config: BridgeConfig,
        bases: Sequence[BaseModelSpec],
        options: Sequence[ServeOptions],
        *,
        trains: bool,
        serves_here: bool = True,
        takes_turns: bool = True,
        beside_trainer: bool = True,
        machine: Machine | None = None,
    ) -> None:
        self._config, self._bases, self._options = config, tuple(bases), tuple(options)
        self._serves_here = serves_here
        self._takes_turns = takes_turns and config.train.max_staleness == 0
        self._machine = self._read_machine(trains) if machine is None else machine
        trainer = self._trainer_need() if self._machine.cards and beside_trainer else None
        if trainer is None and beside_trainer and config.train.devices is not None:
            raise ServingError(
                "train.devices names a card, but there is none that the driver and torch see: leave it out"
            )
        needs = [self._engine_need(base, serve) for base, serve in zip(self._bases, self._options, strict=True)]
        self._trains_hidden = trains and beside_trainer and not self._machine.cards and self._torch_has_cards()
        if self._trains_hidden:
            _refuse_unplanned_share(need for need in needs if need is not None)
        try:
            self._plan = plan_devices(self._machine, needs, trainer)
        except ServingError:
            if trains or trainer is None:
                raise
            self._plan = plan_devices(self._machine, needs)

    @property
    def plan(self) -> DevicePlan:
        """Who takes which card."""
        return self._plan

    def serve_options(self) -> list[ServeOptions]:
        """The options of each server with what was planned for it."""
        return [
            options if engine is None else self._place(options, engine)
            for options, engine in zip(self._options, self._plan.engines, strict=True)
        ]

    def trainer_options(self) -> TrainerOptions:
        """The trainer's options with its card, where there are several to choose from; the first learner's."""
        trainer = self._config.train.trainer
        if not self._plan.learners or len(self._machine.cards) < 2:
            return trainer
        system = trainer.system.model_copy(update={"device": f"cuda:{self._plan.learners[0]}"})
        return trainer.model_copy(update={"system": system})

    def taken_cards(self) -> set[str]:
        """The cards that this command uses, by every name that CUDA_VISIBLE_DEVICES may have for them."""
        engines = [number for engine in self._plan.engines if engine is not None for number in engine.devices]
        cards = [self._machine.cards[number] for number in (*engines, *self._plan.learners)]
        return {name for card in cards for name in (card.visible_name, *card.other_names)}

    def learner_devices(self) -> list[str]:
        """Where each learner of this machine computes, as torch names it; that of a single one is as its options say.

        Raises:
            ServingError: several on cards that the driver does not list, so that nobody knows how many there are.
        """
        count, device = self._config.learners_here, self._config.train.trainer.system.device
        if count == 1:
            return [self.trainer_options().system.device]
        if self._plan.learners:
            return [f"cuda:{number}" for number in self._plan.learners]
        if device != "cpu":
            import torch  # late, for it takes seconds

            if torch.cuda.is_available():
                raise ServingError(
                    f"train.learners is {count}, but the driver lists no card that each could have: set it to 1, or "
                    "train.trainer.system.device to 'cpu'"
                )
        return ["cpu"] * count

    def lines(self) -> list[str]:
        """Who has which device, one line each."""
        rows = []
        for position, (base, options) in enumerate(zip(self._bases, self._options, strict=True)):
            if options.attach is not None:
                text = f"at {options.attach}, which runs already"
            elif not self._serves_here:
                text = "where Ray puts its workers"
            elif vllm_runs_on_cpu():
                text = "CPU"
            else:
                text = self._plan.engine_text(position) or "as vLLM chooses, since the driver lists no card"
            rows.append(f"{base.title}: {text}")
        training = "a card, as torch chooses" if self._trains_hidden else self._plan.trainer_text()
        return [f"devices: {row}" for row in (*self._machine.notes, *rows, f"training: {training}")]

    def _read_machine(self, trains: bool) -> Machine:
        """This one; torch is asked where the driver lists nothing and this command uses a card."""
        machine = read_machine()
        serves = self._serves_here and not vllm_runs_on_cpu() and any(serve.attach is None for serve in self._options)
        if machine.cards or not (serves or (trains and self._config.train.trainer.system.device != "cpu")):
            return machine
        from_torch = ask_torch()
        return from_torch if from_torch.cards else machine

    def _torch_has_cards(self) -> bool:
        """Whether the trainer computes on a card, whoever lists it."""
        if self._config.train.trainer.system.device == "cpu" or not has_driver():
            return False
        import torch  # late, for it takes seconds

        return torch.cuda.is_available()

    def _place(self, options: ServeOptions, engine: EnginePlan) -> PlacedServeOptions:
        planned_values = {
            "devices": engine.devices,
            "tensor_parallel": engine.tensor_parallel,
            "gpu_memory_utilization": engine.utilization,
            "visible_devices": tuple(self._machine.cards[number].visible_name for number in engine.devices),
            "copies": engine.copies,
            "sleeps": engine.sleeps,
        }
        given_values = {name: getattr(options, name) for name in ServeOptions.model_fields}
        # Not checked again: a file gives the cache's size or a share, and vLLM wants both. What the file did not set is
        # not set here either, or its mere default would be refused as an option without effect.
        set_names = options.model_fields_set | set(planned_values)
        return PlacedServeOptions.model_construct(_fields_set=set_names, **given_values | planned_values)

    def _engine_need(self, base: BaseModelSpec, options: ServeOptions) -> EngineNeed | None:
        if options.attach is not None or not self._serves_here or vllm_runs_on_cpu():
            return None
        table = f"models.{base.name}.serve" if base.name else "serve"
        if not self._machine.cards:
            return EngineNeed(table, options, shape=None)
        from trainers.checks.memory_plan import model_to_shape  # imported late: it imports torch

        lora = self._config.train.trainer.lora
        if options.lora_target_modules is not None:
            lora = lora.model_copy(update={"target_modules": options.lora_target_modules})
        method = quantization_of(options.extra_args)
        is_unknown = "quantization_config" in read_model_config(base.directory) or method not in (None, "bitsandbytes")
        return EngineNeed(
            table,
            options,
            shape=None if is_unknown else model_to_shape(base.directory, lora),
            rank=lora.rank,
            context=context_length(base.directory),
            four_bit=method == "bitsandbytes",
        )

    def _trainer_need(self) -> TrainerNeed | None:
        options, nodes = self._config.train.trainer, self._config.graph.nodes
        if options.system.device == "cpu":
            return None
        import torch  # late, and only where there is a card

        from trainers.adapters.adapter_map import options_to_adapters
        from trainers.checks.memory_guard import MemoryGuard

        if not torch.cuda.is_available():
            return None
        directories = {node: directory_of(self._bases, node) for node in nodes}
        adapters = options_to_adapters(options, nodes, directories)
        guard = MemoryGuard(options, adapters, torch.device("cuda"), learners=self._config.train.learners)
        plan, devices = guard.plan(), self._config.train.devices
        learners = self._config.learners_here
        if plan is None:
            return TrainerNeed(None, None, self._takes_turns, devices=devices, learners=learners)
        least = plan.loaded + plan.scratch
        scoring = least + self._teacher_bytes()  # a teacher is gone before the update

        def advice(room: int) -> str:
            return "name a smaller train.teacher" if least <= room < scoring else guard.advice(room)

        peak = max(plan.total - plan.features, scoring)  # features are in host memory
        return TrainerNeed(plan.loaded, peak, self._takes_turns, advice=advice, devices=devices, learners=learners)

    def _teacher_bytes(self) -> int:
        """What the weights of `train.teacher` take on a card; 0 without one, and where its size is not known."""
        from trainers.checks.memory_plan import model_to_shape, weights_to_bytes

        if self._config.train.teacher is None:
            return 0
        try:
            teacher_dir = prepare_directory(self._config.train.teacher, self._config.model)
        except (ConfigError, ServingError):  # `train` says what is wrong with it; other commands do without
            return 0
        shape = model_to_shape(teacher_dir, self._config.train.trainer.lora)
        return 0 if shape is None else weights_to_bytes(shape, "cuda")


def _refuse_unplanned_share(needs: Iterable[EngineNeed]) -> None:
    """Refuses a server that would take 0.92 of a card on which the trainer loads next."""
    for need in needs:
        if need.options.gpu_memory_utilization is None:
            raise ServingError(
                f"the trainer computes on a card that the driver does not list, so that nobody knows what is left for "
                f"the model server of {need.table}: set {need.table}.gpu_memory_utilization, as 0.4 where they share "
                "one, or train.trainer.system.device = 'cpu'"
            )


def quantization_of(arguments: Sequence[str]) -> str | None:
    """The method that vLLM's arguments name, the last one, as vLLM takes it; None without one.

    `--quantization fp8`, `--quantiz=fp8`, `-q fp8`, `-q=fp8` and `-qfp8` name the same.
    """
    method = None
    for position, argument in enumerate(arguments):
        flag = argument_to_flag(argument)
        if flag is None or not (flag.startswith("-q") or (len(flag) > 2 and "--quantization".startswith(flag))):
            continue
        if flag.startswith("-q") and len(flag) > 2:
            method = argument.removeprefix("-q").removeprefix("=")
        else:
            method = argument_to_value(arguments, position)
    return method
