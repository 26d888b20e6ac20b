"""`train.loggers` as the configuration writes it: names of loggers, or tables where one needs an option.

Invariant: as it is, a logger writes into the run's folder and sends nothing; what sends has to be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator


class _Logger(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TensorboardOptions(_Logger):
    """Event files in the run's folder tensorboard/."""

    name: Literal["tensorboard"] = "tensorboard"
    """Needs the extra `tensorboard`."""


class WandbOptions(_Logger):
    """Weights & Biases: files in the run's folder loggers/wandb/, or its server."""

    name: Literal["wandb"] = "wandb"
    """Needs the package wandb."""
    mode: Literal["offline", "online"] = "offline"
    """`online` sends to the server that `wandb login` or WANDB_BASE_URL names; `wandb sync` sends what is offline."""
    project: str | None = Field(None, min_length=1)
    """The project; the configuration's `name` without one."""
    entity: str | None = Field(None, min_length=1)
    """The user or team that it belongs to."""


class MlflowOptions(_Logger):
    """MLflow: a SQLite file in the run's folder loggers/mlflow/, or a tracking server."""

    name: Literal["mlflow"] = "mlflow"
    """Needs mlflow, or mlflow-skinny; the file needs sqlalchemy and alembic too, which mlflow brings."""
    tracking_uri: str | None = Field(None, min_length=1)
    """Where to send to, as http://127.0.0.1:5000; without one it is the file."""
    experiment: str | None = Field(None, min_length=1)
    """The experiment; the configuration's `name` without one."""

    @field_validator("tracking_uri")
    @classmethod
    def _names_no_user(cls, uri: str | None) -> str | None:
        parts = urlsplit(uri or "")
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "holds a user or password, which the run's folder would keep; put them into the environment variables "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or into those of the database"
            )
        return uri


class TrackioOptions(_Logger):
    """trackio: a SQLite file in the run's folder loggers/trackio/, or a Space of the Hugging Face Hub."""

    name: Literal["trackio"] = "trackio"
    """Needs the package trackio."""
    project: str | None = Field(None, min_length=1)
    """The project; the configuration's `name` without one."""
    space: str | None = Field(None, min_length=1)
    """The Space to send to, as owner/name; without one it is the file."""


AnyLoggerOptions = TensorboardOptions | WandbOptions | MlflowOptions | TrackioOptions

LOGGERS: dict[str, type[AnyLoggerOptions]] = {
    str(options.model_fields["name"].default): options for options in get_args(AnyLoggerOptions)
}


def _name_to_table(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _value_to_tag(value: Any) -> str:
    return str(value.get("name") if isinstance(value, dict) else getattr(value, "name", None))


_TAGGED = tuple(Annotated[options, Tag(name)] for name, options in LOGGERS.items())
_DISCRIMINATOR = Discriminator(
    _value_to_tag,
    custom_error_type="loggers",
    custom_error_message="a name, or a table whose name is one of " + ", ".join(LOGGERS),
)
if TYPE_CHECKING:
    AnyLogger = AnyLoggerOptions
else:
    AnyLogger = Annotated[Union[_TAGGED], _DISCRIMINATOR, BeforeValidator(_name_to_table)]  # noqa: UP007
"""A logger's table, or its name alone."""
