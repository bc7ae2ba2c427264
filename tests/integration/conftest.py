"""One real server for all client tests of the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.live_server import LiveServer, live_server
from tests.search_engine import search_engine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_live: stops the session's server, so it runs last")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("ends_live") is not None)


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """`shuntyard serve` with the demo models; its end is checked when the session ends."""
    functions = Path(__file__).with_name("functions.py")
    with (
        search_engine() as url,
        live_server("--searxng-url", url, "--workflow-functions", str(functions)) as server,
    ):
        yield server
