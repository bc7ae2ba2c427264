"""One real server for all client tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """`shuntyard serve` with the demo models; its end is checked when the session ends."""
    with live_server() as server:
        yield server
