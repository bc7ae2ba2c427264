"""Fixtures that all tests share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from server.text.tokenizer import ChatTokenizer
from tests.harness import demo_tokenizer

# A slow machine is no bug.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """What serves in production: asyncio on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """The demo model's tokenizer."""
    return demo_tokenizer()
