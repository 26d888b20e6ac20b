"""`[promote]` of bridge.toml: what has to hold before adapter versions are signed off."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.gate_expression import expression_to_gate


class PromoteOptions(BaseModel):
    """What `marft-bridge promote` asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gate: str | None = None
    """The condition, as `correct>0 and tokens<1.2x`; --if overrides it. Without one the deciding metric has to be shown
    to be better."""
    safety: str | None = None
    """A function of the candidate's recorded runs that must return True; may be async."""
    safety_command: tuple[str, ...] = ()
    """A command that must exit with 0 while the candidate is served beside it; MARFT_SERVER_URL and others tell it
    where."""
    safety_timeout_s: float = Field(600.0, gt=0)
    """Seconds after which the function, or the command, has not passed."""
    key_env: str | None = None
    """Environment variable that holds the key that manifests are signed with."""

    @field_validator("gate")
    @classmethod
    def _is_a_condition(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                expression_to_gate(text)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return text
