"""The base models of a configuration -> servers side by side that answer as one: each node's calls go to its own model.

Invariants: a node runs on one base model, whose adapters alone it has; nodes that no table names run on the first. It
knows no graph, no episode and no training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

from marft_bridge.adapters import AdapterRegistry
from marft_bridge.bases import Base
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ServingError
from marft_bridge.lineage import bases_to_lineage
from marft_bridge.policy import NodeChat
from marft_bridge.progress import Reporter
from marft_bridge.rewards.contract import Served
from marft_bridge.routing import Route
from marft_bridge.served_model import ServedModel
from marft_bridge.server_command import ServeOptions, vllm_runs_on_cpu
from marft_bridge.server_keeper import ServerKeeper
from trainers.files import weights_to_sha256

V = TypeVar("V")


class ServedModels:
    """Base models and their adapters; within `served`, their servers and one chat model for all nodes too.

    Args:
        bases: at least one; the first answers rewards that ask a model.
        adapters: the folder of all adapter versions.
    """

    chat: NodeChat
    place: Served
    """Where a reward finds the first base model, to ask it."""

    def __init__(self, config: BridgeConfig, bases: Sequence[Base], adapters: Path) -> None:
        self.bases = tuple(bases)
        hashes = [weights_to_sha256(base.directory) for base in bases]
        others = {node: sha256 for base, sha256 in zip(bases[1:], hashes[1:], strict=True) for node in base.nodes}
        self.registry = AdapterRegistry(adapters, hashes[0], others)
        self.lineage = bases_to_lineage(self.bases, hashes)  # of every episode that they answer
        self.models = tuple(ServedModel(config, base, self.registry) for base in bases)
        self._of_node = {node: model for model in self.models[1:] for node in model.base.nodes}

    @contextmanager
    def served(
        self, options: Sequence[ServeOptions], log_of: Callable[[str], Path], loop: asyncio.Runner, reporter: Reporter
    ) -> Iterator[Self]:
        """Starts the servers, one after another, or attaches to them, until the block ends.

        Args:
            options: of each base model's server.
            log_of: where the server of the base model of a name writes its output.
            loop: what the connections belong to.

        Raises:
            ServingError: see `ModelServer.start`; several would want the whole of a GPU.
        """
        refuse_whole_gpus(self.bases, options)
        with ExitStack() as stack:
            for model, how in zip(self.models, options, strict=True):
                stack.enter_context(model.served(how, log_of(model.base.name), loop, reporter))
            first, *others = self.models
            self.chat = first.chat.beside([other.chat for other in others])
            self.place = first.as_itself()
            yield self

    # -- adapters ---------------------------------------------------------------------------------------------

    def register_null(self, nodes: Iterable[str]) -> None:
        """Gives each of these nodes a version 0, which changes nothing in its base model, unless it has one."""
        for node in nodes:
            self._model_of(node).register_null([node])

    def publish(self, versions: Mapping[str, int]) -> None:
        """Has each node's server answer to its version."""
        for model, its in self._by_model(versions):
            model.publish(its)

    def retire_all_but(self, keep: Mapping[str, Sequence[int]]) -> None:
        """Takes every other version of these nodes out of service, so that the servers' slots suffice."""
        for model, its in self._by_model(keep):
            model.retire_all_but(its)

    def serve_only(self, versions: Mapping[str, Sequence[int]]) -> None:
        """Has the servers answer to these versions of these nodes, and to no others of theirs."""
        for model, its in self._by_model(versions):
            model.serve_only(its)

    def loaded(self) -> set[str]:
        """Names of the adapters in service."""
        return {name for model in self.models for name in model.server.loaded()}

    def route(self, node: str, version: int, temperature: float | None) -> Route:
        """Where the calls of `node` at `version` go."""
        return self._model_of(node).route(node, version, temperature)

    def place_of(self, node: str, version: int) -> Served:
        """Where `node` at `version` answers anybody who has the key."""
        return self._model_of(node).place_of(node, version)

    # -- servers ----------------------------------------------------------------------------------------------

    @property
    def keepers(self) -> tuple[ServerKeeper, ...]:
        """What watches each server."""
        return tuple(model.keeper for model in self.models)

    def check(self) -> None:
        """Raises ServingError when one of the servers is lost for good."""
        for keeper in self.keepers:
            keeper.check()

    def came_back(self, began: float) -> bool:
        """Whether any server was started again since `began`; see `ServerKeeper.came_back`."""
        back = [keeper.came_back(began) for keeper in self.keepers]  # every one is asked: several may be down
        return any(back)

    def _model_of(self, node: str) -> ServedModel:
        return self._of_node.get(node, self.models[0])

    def _by_model(self, of_nodes: Mapping[str, V]) -> list[tuple[ServedModel, dict[str, V]]]:
        parts = [(m, {n: value for n, value in of_nodes.items() if self._model_of(n) is m}) for m in self.models]
        return [(model, its) for model, its in parts if its]


def refuse_whole_gpus(bases: Sequence[Base], options: Sequence[ServeOptions]) -> None:
    """Raises ServingError where several servers would each want a whole GPU: vLLM takes 0.9 of it by itself."""
    if len(options) == 1 or vllm_runs_on_cpu():
        return
    for base, how in zip(bases, options, strict=True):
        if how.attach is None and how.gpu_memory_utilization is None:
            table = f"models.{base.name}.serve" if base.name else "serve"
            raise ServingError(
                f"{len(options)} model servers share the GPU: give each its share with {table}.gpu_memory_utilization"
            )
