from typing import Any

import pytest

from workflows.json_values import MAX_DEPTH, check_json


def nested(depth: int) -> Any:
    value: Any = 1
    for place in range(depth):
        value = [value] if place % 2 else {"a": value}
    return value


def test_what_is_deep_is_told_from_what_is_no_json() -> None:
    check_json(nested(MAX_DEPTH))
    with pytest.raises(ValueError, match="deeper than 150 levels"):
        check_json(nested(MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="no JSON"):
        check_json({"a": object()})
