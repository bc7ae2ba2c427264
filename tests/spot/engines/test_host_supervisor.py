"""What follows a host's death. The supervisor's work is tested through the engines that use it."""

from __future__ import annotations

import pytest

from spot.engines.host_process import HostConfig
from spot.engines.host_supervisor import Restarts

CONFIG = HostConfig(
    {}, min_backoff_s=1.0, max_backoff_s=5.0, healthy_after_s=60.0, max_start_attempts=3
)

FAILED_START = (None, False)
FATAL_START = (None, True)
DIED_YOUNG = (10.0, False)
DIED_HEALTHY = (60.0, False)
SAID_FATAL = (10.0, True)


@pytest.mark.parametrize(
    ("deaths", "delays_s"),
    [
        pytest.param([FATAL_START], [None], id="a fatal start is not repeated"),
        pytest.param([FAILED_START] * 3, [1, 2, None], id="failing starts are given up"),
        pytest.param([FAILED_START, FATAL_START], [1, None], id="even a later one may be fatal"),
        pytest.param([DIED_YOUNG] * 5, [1, 2, 4, 5, 5], id="delays double up to a limit"),
        pytest.param([DIED_YOUNG, DIED_YOUNG, DIED_HEALTHY, DIED_YOUNG], [1, 2, 1, 2], id="health"),
        pytest.param([DIED_YOUNG] + [FAILED_START] * 4, [1, 2, 4, 5, 5], id="never after success"),
        pytest.param([SAID_FATAL, FATAL_START], [1, 2], id="fatal no more after success"),
        pytest.param(
            [FAILED_START, FAILED_START, DIED_YOUNG, FAILED_START], [1, 2, 4, 5], id="late success"
        ),
    ],
)
def test_each_death_is_followed_by_a_start_or_none(
    deaths: list[tuple[float | None, bool]], delays_s: list[float | None]
) -> None:
    restarts = Restarts(CONFIG)
    assert delays_s == [
        restarts.delay_after_s(served_s=served_s, is_fatal=is_fatal)
        for served_s, is_fatal in deaths
    ]
