"""Errors, named for the boundary that was crossed.

    UserError                   (trace_store.errors) one clear line for the user: what, where, what to do
    ├── StoreError              (trace_store.errors) the DuckDB file and its journals
    ├── TrainError              (trainers.errors) model directories, adapters, batches
    BridgeError                 a UserError of this package; the CLI exits with 2
    ├── ConfigError             bridge.toml or a flag
    ├── GraphError              the user's app: import, node names, tasks, rewards
    │   ├── EpisodesFailedError      the app ran, and its episodes failed; the CLI exits with 1
    │   └── RewardFailedError        a reward raised, or gave no number: its episode fails, and no other
    ├── NoSignalError           rewards from which training can learn nothing; the CLI exits with 1
    ├── ServingError            vLLM: start, port, health, adapters
    └── ClusterError            Ray: the cluster, its workers, what they sent

`UserError` is in the lowest package, so that recording need not import the trainer; the CLI catches `USER_ERRORS`.
"""

from __future__ import annotations

from marft_bridge.common.printable import text_to_line
from trace_store.errors import StoreError, UserError

MAX_MESSAGE_CHARACTERS = 2_000


class BridgeError(UserError):
    """Something that the user can put right. The message is one line, to which a server's log may add its last ones."""

    exit_code = 2  # of the command line


class QuotingError(BridgeError):
    """What quotes a file or a request of anybody's: its message is one printable line, whatever is quoted."""

    def __init__(self, message: str) -> None:
        super().__init__(text_to_line(message, MAX_MESSAGE_CHARACTERS))


class ConfigError(QuotingError):
    """The configuration is missing, unreadable or contradicts itself."""


class GraphError(QuotingError):
    """The user's graph, tasks or reward cannot be used."""


class EpisodesFailedError(GraphError):
    """The app was run as it is meant to be, and all its episodes failed, or most: with the commonest reason."""

    exit_code = 1


class RewardFailedError(GraphError):
    """A reward raised something, or gave what is no reward. It ends its episode, which has no rewards then."""


class NoSignalError(BridgeError):
    """All is as configured, and the episodes' rewards say too little of what is better to train on."""

    exit_code = 1


class ServingError(BridgeError):
    """The model server did not start, died, or answered something unusable."""


class ClusterError(BridgeError):
    """The Ray cluster or a worker on it cannot be used."""


USER_ERRORS = (UserError,)

__all__ = [
    "USER_ERRORS",
    "BridgeError",
    "ClusterError",
    "ConfigError",
    "EpisodesFailedError",
    "GraphError",
    "NoSignalError",
    "QuotingError",
    "RewardFailedError",
    "ServingError",
    "StoreError",
    "UserError",
]
