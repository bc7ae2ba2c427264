"""What may be a value in a run: JSON, no deeper than can be written down with what is around it."""

from __future__ import annotations

from typing import Any

import orjson

MAX_DEPTH = 150
# orjson writes 254 levels. What a run keeps of a value stands some levels deep itself.
_LEVELS = 254


def check_json(value: Any) -> None:
    """Raises ValueError for what is no JSON, or is nested deeper than MAX_DEPTH."""
    around = value
    for _ in range(_LEVELS - MAX_DEPTH):
        around = [around]
    try:
        orjson.dumps(around)
    except orjson.JSONEncodeError as error:
        if "ecursion" in str(error):
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
        raise ValueError(f"it is no JSON: {error}") from None
