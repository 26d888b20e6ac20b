"""Lists of token ids and log-probs <-> short texts, for the attributes of spans.

A call has hundreds of them, and a text of base64 is written, copied and read many times faster than a JSON list. Its
prefix gives the type: `i4:` is little-endian 32-bit integers, `f8:` little-endian 64-bit floats. Invariant: unpacked
values equal the packed ones to the bit.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence

INTS, FLOATS = "i4:", "f8:"
_CODES = {INTS: ("i", 4), FLOATS: ("d", 8)}  # as `struct` writes a number, and in how many bytes


def ints_to_text(values: Sequence[int]) -> str:
    """Integers of 32 bits with their sign as a text. Raises OverflowError for others."""
    try:
        return _to_text(INTS, values)
    except struct.error as error:
        raise OverflowError(str(error)) from None


def floats_to_text(values: Sequence[float]) -> str:
    """Floats as a text; NaN and infinities included."""
    return _to_text(FLOATS, values)


def text_to_values(text: str, prefix: str) -> tuple[int, ...] | tuple[float, ...] | None:
    """The values that `ints_to_text` or `floats_to_text` packed; None for a text without that prefix.

    Raises:
        ValueError: the text has the prefix, and is damaged.
    """
    if not text.startswith(prefix):
        return None
    packed = binascii.a2b_base64(text[len(prefix) :], strict_mode=True)
    code, size = _CODES[prefix]
    if len(packed) % size:
        raise ValueError("a packed list ends in the middle of a number")
    return struct.unpack(f"<{len(packed) // size}{code}", packed)


def _to_text(prefix: str, values: Sequence[float]) -> str:
    code, _ = _CODES[prefix]
    packed = struct.pack(f"<{len(values)}{code}", *values)
    return prefix + binascii.b2a_base64(packed, newline=False).decode()
