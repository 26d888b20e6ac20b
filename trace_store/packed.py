"""Lists of token ids and log-probs <-> short texts, for the attributes of spans.

A call has hundreds of them, and a text of base64 is written, copied and read many times faster than a JSON list. The
text says what it is: `i4:` is little-endian 32-bit integers, `f8:` little-endian 64-bit floats. Invariant: what comes
back is equal to the bit. Which attribute holds what is not known here.
"""

from __future__ import annotations

import binascii
import sys
from array import array
from collections.abc import Sequence

INTS, FLOATS = "i4:", "f8:"
_CODES = {INTS: "i", FLOATS: "d"}
_SIZES = {INTS: 4, FLOATS: 8}


def ints_to_text(values: Sequence[int]) -> str:
    """Integers of 32 bits with their sign as a text. Raises OverflowError for others."""
    return _to_text(INTS, values)


def floats_to_text(values: Sequence[float]) -> str:
    """Floats as a text; NaN and infinities included."""
    return _to_text(FLOATS, values)


def text_to_values(text: str, prefix: str) -> list[int] | list[float] | None:
    """What `ints_to_text` or `floats_to_text` packed; None for a text without that prefix.

    Raises:
        ValueError: the text has the prefix, and is damaged.
    """
    if not text.startswith(prefix):
        return None
    packed = binascii.a2b_base64(text[len(prefix) :], strict_mode=True)
    if len(packed) % _SIZES[prefix]:
        raise ValueError("a packed list ends in the middle of a number")
    values = array(_CODES[prefix])
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _to_text(prefix: str, values: Sequence[float]) -> str:
    packed = array(_CODES[prefix], values)
    if sys.byteorder == "big":
        packed.byteswap()
    return prefix + binascii.b2a_base64(packed.tobytes(), newline=False).decode()
