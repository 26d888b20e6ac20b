"""`[ray]` of bridge.toml: which cluster collects or learns, with how many workers, and which model servers answer.

Invariant: every key has an effect, and a value that cannot work is refused when it is read. It imports no Ray.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from marft_bridge.common.addresses import refuse_server_address

AUTO = "auto"
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


def address_to_host_port(address: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[IPV6]:PORT` -> host and port. Raises ValueError."""
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"{address!r} is not of the form HOST:PORT")
    return match[1].strip("[]"), int(match[2])


class RayOptions(BaseModel):
    """A Ray cluster, where `collect.engine`, `train.rollouts` or `train.engine` is "ray"; needs the extra `ray`. The
    learners of `train.engine` read `address`, `working_dir` and `start_timeout_s`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    address: str | None = None
    """HOST:PORT of a cluster that runs and that this machine is part of ("auto" finds it); None: one on this machine,
    for this command."""
    workers: int = Field(2, ge=1)
    """Collectors. Each is a process, and one that dies is replaced."""
    in_flight: int | None = Field(None, ge=1)
    """Episodes that each worker runs at the same time; None takes `collect.in_flight` for each."""
    endpoints: tuple[str, ...] = ()
    """Addresses of vLLM servers that run already, which the workers share in turn. They and the workers must see the
    run folder's adapters, and the workers the model, under this machine's paths. Empty: each worker starts its own."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of `endpoints`, here and on the workers. With it, endpoints
    on other machines need https."""
    cpus_per_worker: float = Field(1.0, ge=0)
    """What Ray sets aside for a worker, its model server included."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """Likewise. 0 where the servers are in `endpoints` or run on CPUs; refused where several workers would start theirs
    on cards."""
    working_dir: str | None = None
    """A folder that is sent to workers and learners, who work in it; what .gitignore names stays here. None: they
    change into the folder that the command runs in, which must be there under the same path."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds in which a worker must be able to run episodes, its place in the cluster and its server included, and in
    which the learners of `train` must find room."""

    @field_validator("address")
    @classmethod
    def _address_is_that_of_a_cluster(cls, address: str | None) -> str | None:
        if address is None or address == AUTO:
            return address
        if "://" in address:
            raise ValueError(
                f"{address!r} is that of Ray's client, which is not supported: start the command on a machine of the "
                "cluster, and give HOST:PORT or 'auto'"
            )
        try:
            address_to_host_port(address)
        except ValueError as error:
            raise ValueError(f"{error}, as `ray start --head` shows it; or give 'auto'") from None
        return address

    @model_validator(mode="after")
    def _options_fit_together(self) -> RayOptions:
        if self.api_key_env is not None and not self.endpoints:
            raise ValueError("api_key_env applies to endpoints only; servers that the workers start get random keys")
        for endpoint in self.endpoints:
            try:
                refuse_server_address(endpoint, key=self.api_key_env is not None)
            except ValueError as error:
                raise ValueError(f"endpoints: {error}") from None
        return self
