"""Cards as CUDA_VISIBLE_DEVICES calls them -> their UUIDs, by which a card is told from another in every process.

Invariant: a name that the driver does not know stays what it is. A number, a UUID and the beginning of one may all mean
one card.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from marft_bridge.devices.machine import ask_driver


def visible_names(environment: Mapping[str, str]) -> list[str]:
    """The cards that an environment leaves visible, as it calls them; none where it does not say."""
    return [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def names_to_uuids(names: Collection[str]) -> frozenset[str]:
    """The UUIDs of cards of this machine, which the driver is asked for where there are any."""
    if not names:
        return frozenset()
    return rows_to_uuids(ask_driver("index,uuid") or "", names)


def rows_to_uuids(text: str, names: Collection[str]) -> frozenset[str]:
    """Rows `INDEX, UUID` of the driver, and names -> UUIDs."""
    cards = [row.split(", ")[:2] for row in text.splitlines() if row.count(", ")]

    def to_uuid(name: str) -> str:
        matches = [uuid for index, uuid in cards if name == index or uuid.startswith(name)]
        return matches[0] if len(matches) == 1 else name

    return frozenset(map(to_uuid, names))


def same_cards(uuids: Collection[str], other_uuids: Collection[str]) -> list[str]:
    """The cards that are among both, from whichever machines; a mere number says nothing of another machine's."""
    return sorted(uuid for uuid in set(uuids) & set(other_uuids) if not uuid.isdecimal())
