"""What `shuntyard serve` runs, with a slow scripted engine: for tests that end it by signals.

Prints the port once it serves.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial

import anyio

from server import serve
from server.gateway import Admission, Gateway, ServedModel
from server.logs import configure_logging
from server.metrics import Metrics
from server.model_cache import silent
from server.parts import Parts, build_resources
from server.pooling_metrics import PoolingMetrics
from server.pooling_models import ServedPoolingModels
from server.pools import Pools
from server.settings import Settings
from server.sse import StreamKeeper
from spot.engines.scripted import ScriptedEngine
from spot.fleet import Fleet, PipelineSpec
from tests.harness import demo_tokenizer


async def no_more(wanted: object) -> PipelineSpec:
    raise NotImplementedError


def main() -> int:
    settings = Settings(port=0, shutdown_timeout=float(sys.argv[1]))
    configure_logging(form="json", level="info")
    tokenizer = demo_tokenizer()
    assert tokenizer.eos_token_id is not None
    engine = ScriptedEngine(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        script=lambda generation: [28] * 200,
        step_time_s=0.05,
    )
    fleet = Fleet([PipelineSpec("local-1", engine)])
    gateway = Gateway(
        model=ServedModel(["demo"], tokenizer, fleet),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=100, max_queue=100),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
        version="0.0-test",
    )
    listener = serve._bind(settings)
    print(listener.getsockname()[1], flush=True)
    pools, pooling_metrics = Pools(), PoolingMetrics(gateway.metrics.registry)
    models = ServedPoolingModels(pools, ["demo"], pooling_metrics)
    resources = build_resources(settings, models, silent)
    parts = Parts(gateway, fleet, no_more, [], pools, pooling_metrics, resources, {}, deque())
    return anyio.run(
        partial(serve._run, settings, parts, listener), backend_options={"use_uvloop": True}
    )


if __name__ == "__main__":
    sys.exit(main())
