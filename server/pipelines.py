"""The pipelines of a server: engines on this machine, and servers that there are already."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.gpus import GpuAllotment, visible_gpus
from server.planned_engines import PlannedEngine
from server.protocol.admin import NewPipeline
from server.settings import Settings, SettingsError
from server.version import INSTANCE
from spot.engines.hosted import HostConfig, HostedEngine
from spot.engines.upstream import UpstreamEngine
from spot.engines.upstream_config import UpstreamConfig
from spot.errors import InvalidRequest
from spot.fleet import PipelineSpec

logger = logging.getLogger("shuntyard.engine")


class PipelineMaker:
    """Makes the engines of pipelines, at start and whenever an operator wants one more.

    last_lines: takes what the engines' processes write.
    vocab_size: of the model, which upstreams do not tell.
    on_step: hears of each engine step how many tokens it had.
    planned: the engines of a plan; without one, engines are alike and as many as the settings say.
    """

    def __init__(
        self,
        settings: Settings,
        engine_args: dict[str, Any],
        last_lines: deque[str],
        *,
        vocab_size: int,
        on_step: Callable[[int], None],
        planned: Sequence[PlannedEngine] = (),
    ) -> None:
        self._planned = planned
        self._on_step = on_step
        self._vocab_size = vocab_size
        self._settings = settings
        self._engine_args = engine_args
        self._last_lines = last_lines
        self._num_made = 0
        num_each = math.prod(
            int(engine_args.get(name) or 1)
            for name in ("tensor_parallel_size", "pipeline_parallel_size")
        )
        self._gpus = GpuAllotment(visible_gpus(os.environ), num_each, 1)

    def at_start(self) -> list[PipelineSpec]:
        """What the settings ask for. Raises SettingsError if that is nothing."""
        upstreams = [_url_and_weight(entry) for entry in self._settings.upstream]
        num_local = self._settings.pipelines
        if self._planned and num_local is not None:
            raise SettingsError("--pipelines: --plan says how many there are; leave it out")
        if num_local is None:
            num_local = 0 if upstreams else 1
        if not num_local and not upstreams:
            raise SettingsError("--pipelines 0 leaves nothing to serve with; give an --upstream")
        self._gpus.num_pipelines = max(1, num_local)
        try:
            remote = [self._upstream(None, url, weight) for url, weight in upstreams]
        except InvalidRequest as error:
            raise SettingsError(f"--upstream (SHUNTYARD_UPSTREAM): {error.message}") from None
        if self._planned:
            return [*map(self._from_plan, self._planned), *remote]
        return [*(self._local(None, 1.0) for _ in range(num_local)), *remote]

    async def make(self, wanted: NewPipeline) -> PipelineSpec:
        """One more pipeline. Raises InvalidRequest for a URL that is none, and for a local one
        where a plan has given the machine away."""
        if wanted.upstream is not None:
            return self._upstream(wanted.id, wanted.upstream, wanted.weight)
        if self._planned:
            raise InvalidRequest(
                "This server runs a plan, which has no room for one more engine on this machine; "
                "give an upstream.",
                param="upstream",
            )
        return self._local(wanted.id, wanted.weight)

    def _upstream(self, pipeline_id: str | None, url: str, weight: float) -> PipelineSpec:
        settings = self._settings
        try:
            config = UpstreamConfig(
                url,
                model=settings.upstream_model,
                own_instance=INSTANCE,
                api_key=settings.upstream_api_key,
                vocab_size=self._vocab_size,
                max_num_seqs=settings.upstream_max_num_seqs,
            )
        except ValueError as error:
            raise InvalidRequest(str(error), param="upstream") from None
        name = pipeline_id or self._next_id("upstream")
        return PipelineSpec(name, UpstreamEngine(config), weight)

    def _local(self, pipeline_id: str | None, weight: float) -> PipelineSpec:
        name = pipeline_id or self._next_id("local")
        memory_args = self._gpus.memory_args(self._engine_args)
        return self._hosted(name, weight, memory_args, self._gpus.next_environment())

    def _from_plan(self, planned: PlannedEngine) -> PipelineSpec:
        name = self._next_id("local")
        return self._hosted(name, planned.weight, planned.engine_args, planned.env)

    def _hosted(
        self, name: str, weight: float, engine_args: Mapping[str, Any], env: Mapping[str, str]
    ) -> PipelineSpec:
        config = HostConfig(
            engine_args={**self._engine_args, **engine_args},
            env=env,
            start_timeout_s=self._settings.engine_start_timeout,
            step_timeout_s=self._settings.engine_step_timeout,
            max_silence_s=self._settings.engine_max_silence,
            stall_timeout_s=self._settings.engine_stall_timeout,
        )

        def on_line(line: str) -> None:
            self._last_lines.append(line)
            logger.debug("%s: %s", name, line)

        engine = HostedEngine(config, label=name, on_line=on_line, on_step=self._on_step)
        return PipelineSpec(name, engine, weight)

    def _next_id(self, kind: str) -> str:
        self._num_made += 1
        return f"{kind}-{self._num_made}"


def _url_and_weight(entry: str) -> tuple[str, float]:
    """`URL` or `URL=WEIGHT`. Raises SettingsError."""
    url, equals, weight = entry.rpartition("=")
    if not equals:
        return entry, 1.0
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SettingsError(
            f"--upstream (SHUNTYARD_UPSTREAM): the weight in {entry} must be a positive number"
        )
    return url, number
