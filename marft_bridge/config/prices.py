"""A dated file of prices, TOML or JSON -> what a million tokens of each model cost, from which day on.

    currency = "USD"

    [[prices]]
    model = "gpt-5-mini"
    since = 2026-08-01
    prompt = 0.25
    sampled = 2.0

    [[prices]]
    model = "local"         # whatever adapters of ours answered
    prompt = 0.02
    sampled = 0.1

Invariant: a file that is wrong anywhere is refused whole, in one line; a model that it does not name has no price.
"""

from __future__ import annotations

import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from marft_bridge.common.errors import ConfigError
from trace_store.store import TraceStore


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelPrice(_Part):
    """What a model costs from a day on."""

    model: str = Field(min_length=1)
    """As it is named in its answers: `actions.model`; or `local`, for whatever adapters of ours answered."""
    since: datetime.date | None = None
    """The first day (UTC) on which it costs so much; None: always."""
    prompt: float = Field(ge=0, allow_inf_nan=False)
    sampled: float = Field(ge=0, allow_inf_nan=False)

    @property
    def since_ns(self) -> int:
        """Unix time in nanoseconds; 0 for always."""
        if self.since is None:
            return 0
        midnight = datetime.datetime.combine(self.since, datetime.time(), tzinfo=datetime.UTC)
        return int(midnight.timestamp()) * 10**9


class PriceTable(_Part):
    """The prices of one file, in one currency."""

    currency: str = Field(min_length=1, max_length=16)
    prices: tuple[ModelPrice, ...] = ()

    def put_into(self, store: TraceStore) -> None:
        """Writes every price into the store, over one of the same model and day."""
        for price in self.prices:
            store.put_price(price.model, price.prompt, price.sampled, currency=self.currency, since_ns=price.since_ns)


def file_to_prices(path: Path, option: str) -> PriceTable:
    """Reads a price file. Raises ConfigError, with what is wrong and where; `option` is what named the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        table = PriceTable.model_validate(content)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{option}: {path}: {where or 'the file'}: {first['msg']}") from None
    except ValueError as error:  # of both parsers
        raise ConfigError(f"{option}: {path} is neither TOML nor, as a .json file, JSON: {error}") from None
    days = [(price.model, price.since_ns) for price in table.prices]
    for day in days:
        if days.count(day) > 1:
            raise ConfigError(f"{option}: {path} names two prices of {day[0]!r} for the same day; leave one out")
    return table
