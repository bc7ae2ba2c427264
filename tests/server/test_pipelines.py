"""Which pipelines the settings ask for."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from server.pipelines import PipelineMaker
from server.protocol.admin import NewPipeline
from server.settings import Settings, SettingsError
from spot.engines.hosted import HostedEngine
from spot.engines.upstream import UpstreamEngine
from spot.errors import InvalidRequest


def maker(**settings: Any) -> PipelineMaker:
    return PipelineMaker(
        Settings(**settings), {"model": "m"}, deque(), vocab_size=10, on_step=lambda tokens: None
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("local-1", 1.0)]),
        ({"pipelines": 2}, [("local-1", 1.0), ("local-2", 1.0)]),
        ({"upstream": ["http://a:1=3", "http://b"]}, [("upstream-1", 3.0), ("upstream-2", 1.0)]),
        ({"pipelines": 1, "upstream": ["http://a"]}, [("local-2", 1.0), ("upstream-1", 1.0)]),
    ],
)
def test_what_is_started(settings: dict[str, Any], expected: list[tuple[str, float]]) -> None:
    specs = maker(**settings).at_start()
    assert [(spec.id, spec.weight) for spec in specs] == expected
    for spec in specs:
        kind = HostedEngine if spec.id.startswith("local") else UpstreamEngine
        assert isinstance(spec.engine, kind)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipelines": 0}, "--pipelines 0"),
        ({"upstream": ["http://a=fast"]}, "positive number"),
        ({"upstream": ["http://a=0"]}, "positive number"),
        ({"upstream": ["ftp://a"]}, r"--upstream \(SHUNTYARD_UPSTREAM\)"),
        ({"upstream": ["a:8000"]}, "URL"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        maker(**settings).at_start()


@pytest.mark.anyio
async def test_one_more_is_local_or_at_a_url() -> None:
    pipelines = maker()
    pipelines.at_start()
    assert (await pipelines.make(NewPipeline())).id == "local-2"
    far = await pipelines.make(NewPipeline(id="far", upstream="http://far:8000", weight=2))
    assert (far.id, far.weight) == ("far", 2.0)
    assert isinstance(far.engine, UpstreamEngine)
    with pytest.raises(InvalidRequest) as caught:
        await pipelines.make(NewPipeline(upstream="nonsense"))
    assert caught.value.param == "upstream"
