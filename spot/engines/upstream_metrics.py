"""An upstream's load, read from its Prometheus metrics."""

from __future__ import annotations

from spot.engines.base import EngineStats

_WAITING = "vllm:num_requests_waiting"
_KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
_CACHE_QUERIES = "vllm:prefix_cache_queries_total"
_CACHE_HITS = "vllm:prefix_cache_hits_total"
_PREEMPTIONS = "vllm:num_preemptions_total"
_NAMES = (_WAITING, _KV_CACHE_USAGE, _CACHE_QUERIES, _CACHE_HITS, _PREEMPTIONS)


def parse_load(exposition: bytes) -> EngineStats:
    """What waits, the KV cache and the totals, of all clients of the upstream.

    Its data-parallel engines are added up; of their KV caches the fullest counts. What is not
    there is 0, `running` always.
    """
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    for line in exposition.decode("utf-8", "replace").splitlines():
        name, _, rest = line.partition("{")
        if name in found and (value := _number(rest.rpartition("}")[2])) is not None:
            found[name].append(value)
    return EngineStats(
        waiting=int(sum(found[_WAITING])),
        kv_cache_usage=max(found[_KV_CACHE_USAGE], default=0.0),
        prefix_cache_queries=int(sum(found[_CACHE_QUERIES])),
        prefix_cache_hits=int(sum(found[_CACHE_HITS])),
        num_preemptions=int(sum(found[_PREEMPTIONS])),
    )


def _number(text: str) -> float | None:
    """The sample's value; a timestamp may stand behind it. None if there is no finite one."""
    try:
        value = float(text.split()[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value < float("inf") else None
