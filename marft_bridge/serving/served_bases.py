"""Base models and their adapter versions -> one server for each base model, behind one interface.

Invariant: a node's calls go to the server of its own base model, at a registered version that the server confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from marft_bridge.common.errors import ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, SamplingOptions
from marft_bridge.config.serve import PlacedServeOptions, ServeOptions
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.routing import Route
from marft_bridge.rewards.contract import ModelAddress
from marft_bridge.serving.adapter_registry import publish, retire
from marft_bridge.serving.base_models import BaseModelSpec
from marft_bridge.serving.model_versions import ModelVersions
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.served_base import ServedBase, serve_base
from marft_bridge.serving.supervisor import Supervisor
from marft_bridge.serving.vllm_arguments import vllm_runs_on_cpu

_BASE_NODE = "(base)"  # no node of LangGraph has such a name


@dataclass(frozen=True, slots=True)
class ServedBases:
    """At least one base model with its running server, until the block of `serve_bases` ends."""

    versions: ModelVersions
    served: tuple[ServedBase, ...]
    sampling: SamplingOptions
    chat: NodeChat
    """One chat model for all nodes: each call goes where its node's base model is served."""
    judge: ModelAddress
    """The first base model itself, as the judge of rewards."""

    # -- adapters ---------------------------------------------------------------------------------------------

    def publish(self, versions: Mapping[str, int]) -> None:
        """Loads each node's version into its server.

        Raises:
            ServingError: see `adapter_registry.publish`; the server is lost for good.
        """
        for node, version in versions.items():
            served_base = self._served_of(node)
            load_version = partial(publish, served_base.server, self.versions.registry, node, version)
            served_base.supervisor.run_with_restarts(load_version)

    def retire_all_but(self, kept_versions: Mapping[str, Sequence[int]]) -> None:
        """Takes every other version of these nodes out of service, so that the servers' slots suffice.

        Args:
            kept_versions: node -> its versions that stay in service.
        """
        for served_base in self.served:
            own_versions = {
                node: versions for node, versions in kept_versions.items() if self._served_of(node) is served_base
            }
            if own_versions:
                served_base.supervisor.run_with_restarts(partial(self._retire_all_but, served_base, own_versions))

    def serve_only(self, versions: Mapping[str, Sequence[int]]) -> None:
        """Loads these versions of these nodes, after all their other versions were taken out of service."""
        self.retire_all_but(versions)
        for node, node_versions in versions.items():
            for version in node_versions:
                self.publish({node: version})

    def adapter_names(self) -> set[str]:
        """Names of the adapters in service."""
        return {name for served_base in self.served for name in served_base.server.adapter_names()}

    def _retire_all_but(self, served_base: ServedBase, kept_versions: Mapping[str, Sequence[int]]) -> None:
        registry, loaded = self.versions.registry, set(served_base.server.adapter_names())
        for node, versions in kept_versions.items():
            for version in registry.versions(node):
                if version not in versions and registry.served_name(node, version) in loaded:
                    retire(served_base.server, node, version)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """The servers that share the trainer's card give their memory back until the block ends."""
        with ExitStack() as stack:
            for supervisor in self.supervisors:
                stack.enter_context(supervisor.asleep())
            yield

    # -- calls ------------------------------------------------------------------------------------------------

    @property
    def lineage(self) -> Mapping[str, str]:
        """Hashes of the base models, tokenizers and templates that the episodes depend on; see `model_lineage`."""
        return self.versions.lineage

    def route(self, node: str, version: int, temperature: float | None) -> Route:
        """The route of the calls of `node` at `version`; without a temperature, that of the configuration."""
        name = self.versions.registry.served_name(node, version)
        return Route(
            model=name,
            adapter=name,
            version=version,
            temperature=temperature or self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            server=self._served_of(node).server.endpoint.base_url,
        )

    def address_of(self, node: str, version: int) -> ModelAddress:
        """The address, with its key, at which `node` answers at `version`."""
        endpoint = self._served_of(node).server.endpoint
        return ModelAddress(endpoint.base_url, self.versions.registry.served_name(node, version), endpoint.api_key)

    def _served_of(self, node: str) -> ServedBase:
        base = self.versions.base_of(node)
        return next(served_base for served_base in self.served if served_base.base is base)

    # -- servers ----------------------------------------------------------------------------------------------

    @property
    def supervisors(self) -> tuple[Supervisor, ...]:
        """The supervisor of each server."""
        return tuple(served_base.supervisor for served_base in self.served)

    def check(self) -> None:
        """Raises ServingError when one of the servers is lost for good."""
        for supervisor in self.supervisors:
            supervisor.check()

    def came_back(self, began: float) -> bool:
        """Whether any server was started again since `began`; see `Supervisor.came_back`."""
        # A list, not a generator: every supervisor must look, because several servers may be down.
        restarted = [supervisor.came_back(began) for supervisor in self.supervisors]
        return any(restarted)


@contextmanager
def serve_bases(
    config: BridgeConfig,
    versions: ModelVersions,
    options: Sequence[ServeOptions],
    *,
    log_of: Callable[[str], Path],
    loop: asyncio.Runner,
    reporter: Reporter,
    placement: Placement | None = None,
    announce: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Iterator[ServedBases]:
    """Starts the servers, one after another, or attaches to them, until the block ends.

    Args:
        options: of each base model's server, in their order.
        log_of: name of a base model -> the file that its server writes its output to.
        loop: the event loop that the connections belong to.
        placement: who takes which card; None plans it for a command that does not train.
        announce: tells others of what was planned here until the block that it opens ends; without a `placement` only.

    Raises:
        ServingError: see `ModelServer.start`, `Placement` and `refuse_whole_gpus`.
    """
    is_planned_here = placement is None
    placement = placement or Placement(config, versions.bases, options, trains=False)
    options = placement.serve_options()
    refuse_whole_gpus(versions.bases, options)
    with ExitStack() as stack:
        if is_planned_here:
            stack.enter_context(announce(placement.lines()[:-1]))  # without the trainer's, which is not there
        served = tuple(
            stack.enter_context(
                serve_base(
                    base,
                    base_options,
                    adapters=versions.registry.root,
                    log=log_of(base.name),
                    collect=config.collect,
                    loop=loop,
                    reporter=reporter,
                )
            )
            for base, base_options in zip(versions.bases, options, strict=True)
        )
        first, *rest = served
        chat = first.chat.add_servers([served_base.chat for served_base in rest])
        yield ServedBases(versions, served, config.sampling, chat=chat, judge=_base_model_address(versions, first))


def _base_model_address(versions: ModelVersions, first: ServedBase) -> ModelAddress:
    """Where the first base model answers without an adapter; on a CPU, through one of zeros (see `zero_adapter`)."""
    name = first.server.endpoint.model
    if not first.server.attached and vllm_runs_on_cpu():
        versions.register_zero([_BASE_NODE])
        first.supervisor.run_with_restarts(partial(publish, first.server, versions.registry, _BASE_NODE, 0))
        name = versions.registry.served_name(_BASE_NODE, 0)
    return ModelAddress(first.server.endpoint.base_url, name, first.server.endpoint.api_key)


def refuse_whole_gpus(bases: Sequence[BaseModelSpec], options: Sequence[ServeOptions]) -> None:
    """Raises ServingError where a server that wants a whole GPU has another on it: vLLM takes 0.92 of it by itself."""
    if vllm_runs_on_cpu():
        return
    started_servers = [pair for pair in zip(bases, options, strict=True) if pair[1].attach is None]
    for base, base_options in started_servers:
        other_servers = [other for other_base, other in started_servers if other_base is not base]
        sharing_servers = [other for other in other_servers if _may_share_a_card(base_options, other)]
        if base_options.gpu_memory_utilization is None and sharing_servers:
            table = f"models.{base.name}.serve" if base.name else "serve"
            raise ServingError(
                f"{len(sharing_servers) + 1} model servers share the GPU: give each its share with "
                f"{table}.gpu_memory_utilization"
            )


def _may_share_a_card(options: ServeOptions, other: ServeOptions) -> bool:
    """Whether two servers were given one card, or one of them none in particular."""
    cards, other_cards = (
        set(serve.visible_devices) if isinstance(serve, PlacedServeOptions) else set() for serve in (options, other)
    )
    return not cards or not other_cards or bool(cards & other_cards)
