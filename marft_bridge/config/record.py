"""`[record]` of bridge.toml: what of a run may be written, and where else it is exported.

Invariant: every key has an effect, and a value that cannot work is refused when it is read. No other environment
variable than the one that `otlp_headers_env` names changes the record.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from marft_bridge.common.redaction_patterns import SECRETS, names_to_patterns


class RecordOptions(BaseModel):
    """What is recorded, what is taken out before it is written, and whether spans are exported too."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    content: bool = True
    """False: no messages, tool arguments, results, tasks or token ids; structure and numbers only. Such a record
    shows who ran when and for how many tokens, and nothing in it can be trained on."""
    redact: tuple[str, ...] = (SECRETS, "card")
    """Built-in patterns, by name or group (`secrets`, `personal`). By default everything but e-mail addresses: an LLM
    call with a redacted text loses its token ids, and an agent that mails people would lose nearly all of its calls."""
    redact_with: str | None = None
    """A function (attribute name, text) -> text to write, as `package.module:attribute` or `path/file.py:attribute`;
    it is called on every text after the patterns."""
    otlp_endpoint: str | None = None
    """Full address that takes OTLP over HTTP, such as `http://localhost:4318/v1/traces`: the spans go there as well."""
    otlp_headers_env: str | None = None
    """Name of the environment variable with the headers of that endpoint, as `name=value,name=value`."""
    other_clients: bool = True
    """Whether calls that nodes make with the packages openai, anthropic and litellm are recorded and, of trained nodes,
    redirected. False: only those of LangChain's chat models; the others go where the app sends them, unseen."""
    sync_delay_s: float = Field(0.1, ge=0, le=60)
    """Seconds from a run's answer until its record is synced to the disk, by a thread and for all runs that ended by
    then. What is not synced yet survives the end of the process, but not a power cut. 0: the answer waits for the sync,
    and so does the app's event loop."""
    keep_app_tracing: bool = False
    """True: the app's own tracing (LangSmith, OpenTelemetry) goes on in the episodes that a command runs. `wrap` and
    `instrument` never touch it."""

    @field_validator("redact")
    @classmethod
    def _patterns_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        names_to_patterns(names)
        return names

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_full_address(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path in ("", "/"):
            raise ValueError("not a full address; give one such as http://localhost:4318/v1/traces")
        if parts.username is not None or parts.password is not None:
            raise ValueError("holds a user or password; put them into a header and name its variable otlp_headers_env")
        return endpoint

    @model_validator(mode="after")
    def _headers_have_an_endpoint(self) -> RecordOptions:
        if self.otlp_headers_env is not None and self.otlp_endpoint is None:
            raise ValueError("otlp_headers_env is set, but no otlp_endpoint to send them to")
        return self
