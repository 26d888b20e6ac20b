"""`python -m support.pages`, which is `make pages`: writes every generated page of docs/ anew."""

from __future__ import annotations

from support.pages import (
    architecture_page,
    commands_page,
    compatibility_page,
    concepts_page,
    config_page,
    store_page,
    trainer_options_page,
    versions_page,
    wrapping_page,
    zoo_page,
)

PAGES = (
    architecture_page,
    commands_page,
    compatibility_page,
    concepts_page,
    config_page,
    store_page,
    trainer_options_page,
    versions_page,
    wrapping_page,
    zoo_page,
)

for page in PAGES:
    page.write()
    print(f"wrote {page.PAGE}")  # noqa: T201 - a script
