"""A vLLM engine without its front end: requests go straight to the engine core, steps come back.

`AsyncLLM` spends a queue, a generator and an output object per request and step; none of that is
needed where a whole step travels on as one message.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingType
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor

from spot.engines.base import EngineCard, Resume
from spot.engines.process_group import describe_exit
from spot.engines.vllm_compat.refusal import Unservable
from spot.engines.vllm_compat.resume import WORKER_EXTENSION
from spot.engines.vllm_compat.sampling import to_vllm
from spot.generation import Generation

__all__ = ["EngineCore", "EngineDeadError"]

logger = init_logger(__name__)

_LAST_WORDS_S = 1.0


class EngineCore:
    """One running vLLM engine core with its workers.

    Construct it on the event loop that will use it; that takes until the engine is ready, and
    blocks. Raises whatever vLLM raises if the engine cannot start.
    """

    def __init__(self, config: Any) -> None:
        maybe_register_config_serialize_by_value()
        self._config = config
        self._renderer = renderer_from_config(config)
        self._inputs = InputProcessor(config, self._renderer)
        self._client = EngineCoreClient.make_async_mp_client(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=True,
            renderer=self._renderer,
        )
        self._processes = multiprocessing.active_children()
        self._tasks: tuple[Any, ...] = ()
        self._resume: Resume = "prompt"
        self._refuse_seeds = (
            current_platform.is_cpu() and config.scheduler_config.enable_chunked_prefill
        )

    async def connect(self) -> None:
        """Ask the engine what it can do. Call once, before the first request."""
        self._tasks = await self._client.get_supported_tasks_async()
        if self._config.parallel_config.worker_extension_cls == WORKER_EXTENSION:
            seeded = await self._client.collective_rpc_async("enable_exact_resume")
            self._resume = "exact" if all(seeded) else "unseeded"

    @property
    def card(self) -> EngineCard:
        model, cache = self._config.model_config, self._config.cache_config
        max_logprobs = model.max_logprobs
        return EngineCard(
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            engine="vllm",
            max_num_seqs=self._config.scheduler_config.max_num_seqs,
            block_size=cache.block_size,
            num_kv_blocks=cache.num_gpu_blocks or 0,
            max_logprobs=model.get_vocab_size() if max_logprobs == -1 else max_logprobs,
            cache={k: v for k, v in cache.metrics_info().items() if not k.startswith("_")},
            resume=self._resume,
        )

    @property
    def pids(self) -> list[int]:
        """The engine core's processes, as far as this process started them."""
        return [child.pid for child in self._processes if child.pid is not None]

    def describe_end(self) -> str:
        """How the dead engine core ended, in words. Blocks for a moment."""
        for process in self._processes:
            process.join(_LAST_WORDS_S)
            if process.exitcode is not None:
                return describe_exit(process.exitcode)
        return "died"

    def prepare(self, request_id: str, generation: Generation) -> EngineCoreRequest:
        """Validate a generation and make the engine's request of it.

        May take long for constrained output. Raises Unservable, ValueError or vLLM's
        VLLMValidationError for a request that cannot be served.
        """
        resumed = generation.output_token_ids
        params = to_vllm(generation.sampling, num_resumed=len(resumed))
        if self._refuse_seeds and params.sampling_type == SamplingType.RANDOM_SEED:
            # A seeded request whose prefill is cut in two ends vLLM 0.32's CPU engine, and
            # neighbours in the batch decide whether it is cut.
            raise Unservable(
                "seed is not available on this engine: it runs on a CPU with chunked prefill",
                "seed",
            )
        request = self._inputs.process_inputs(
            request_id,
            tokens_input(
                [*generation.prompt_token_ids, *resumed], cache_salt=generation.cache_salt
            ),
            params,
            supported_tasks=self._tasks,
            priority=generation.priority,
        )
        # Among requests of one priority vLLM takes the earliest first, and preempts the latest.
        request.arrival_time -= generation.head_start_s or 0.0
        request.external_req_id = request_id
        request.reasoning_ended = generation.reasoning_ended
        return request

    async def add(self, request: EngineCoreRequest) -> None:
        """Hand a prepared request to the engine. Raises EngineDeadError."""
        await self._client.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        """Free what these requests hold. Unknown ones are ignored."""
        await self._client.abort_requests_async(request_ids)

    async def next_step(self) -> EngineCoreOutputs:
        """The outputs of the next engine step. Raises EngineDeadError."""
        return await self._client.get_output_async()

    def shutdown(self, timeout_s: float) -> None:
        """End the engine core and its workers, by force after `timeout_s`. Blocks. Idempotent."""
        self._client.shutdown(timeout=timeout_s)
        self._renderer.shutdown()
