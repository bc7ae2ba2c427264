"""What the engine's log says about its start."""

from __future__ import annotations

import pytest

from spot.engines.vllm_compat.environment import apply_default_environment
from spot.engines.vllm_compat.progress import describe


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("(Worker pid=1) INFO 11-29 [x.py:68] Starting to load model /m...", "loading the model"),
        ("Loading safetensors checkpoint shards:   0% Completed | 0/1", "loading weights"),
        ("INFO [default_loader.py:501] Loading weights took 1.44 seconds", "weights loaded"),
        ("INFO [kv_cache_utils.py] CPU KV cache size: 46,592 tokens", "KV cache allocated"),
        ("nothing of note", None),
    ],
)
def test_known_lines_announce_a_stage(line: str, stage: str | None) -> None:
    assert describe(line) == stage


def test_the_users_environment_is_left_alone() -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "7"}
    apply_default_environment(environ)
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environ["OMP_WAIT_POLICY"] == "PASSIVE"
