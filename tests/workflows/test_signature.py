from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.signature import Identity, signature

SECRET = b"s" * 32


def signed(content: Any = 1, *, operator: str = "llm", scope: str = "t", salt: str = "") -> str:
    return signature(operator, Identity(content=content), scope=scope, salt=salt, secret=SECRET)


def test_the_order_of_keys_does_not_count_and_that_of_items_does() -> None:
    assert signed({"a": 1, "b": [1, 2]}) == signed({"b": [1, 2], "a": 1})
    assert signed([1, 2]) != signed([2, 1])


@pytest.mark.parametrize(
    "other",
    [
        signed(2),
        signed("1"),
        signed(operator="llmx"),
        signed(scope="u"),
        signed(salt="s"),
        signed(operator="ll", salt="m"),
        signed(scope="", salt="t"),
    ],
)
def test_whatever_differs_makes_another_one(other: str) -> None:
    assert other != signed()


def test_without_the_secret_nobody_can_tell() -> None:
    assert signature("llm", Identity(content=1), scope="t", salt="", secret=b"x" * 32) != signed()


@given(st.lists(st.text(), min_size=3, max_size=3), st.lists(st.text(), min_size=3, max_size=3))
def test_no_two_lists_of_parts_read_alike(one: list[str], other: list[str]) -> None:
    def of(parts: list[str]) -> str:
        return signed(operator=parts[0], scope=parts[1], salt=parts[2])

    assert (of(one) == of(other)) == (one == other)
