"""Where requests have been: told on, and refused where they were before."""

from __future__ import annotations

import pytest

from spot.engines.upstream_via import CODE, HEADER, MAX_SERVERS, read_via, via_headers
from spot.errors import InvalidRequest


def test_what_is_told_is_read() -> None:
    headers = via_headers(["first", "second"], "third")
    assert read_via(headers[HEADER], "fourth") == ["first", "second", "third"]


def test_a_server_without_an_id_tells_nothing() -> None:
    assert via_headers(["first"], "") == {}


@pytest.mark.parametrize("via", ["me", "me, other", "other,me", "a, me, b"])
def test_nobody_takes_a_request_twice(via: str) -> None:
    with pytest.raises(InvalidRequest, match="been at this server before") as caught:
        read_via(via, "me")
    assert caught.value.code == CODE


def test_a_chain_has_an_end() -> None:
    longest = [f"server-{number}" for number in range(MAX_SERVERS)]
    assert read_via(", ".join(longest), "me") == longest
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SERVERS}"):
        read_via(", ".join([*longest, "one-more"]), "me")
