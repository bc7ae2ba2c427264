"""Exact resume: a generation goes on in vLLM as if it had never left.

vLLM has no parameter for tokens that a request has already put out. But it keeps such requests
itself: those that it preempted. A resumed request is put into precisely that state, so that all
that looks at the output (limits, penalties, the grammar, seeded chance, bad words) sees what it
would have seen. Emitted tokens arrive as the end of the prompt, with their number in `extra_args`.

Each vLLM process needs its part: the engine core a scheduler from here (`scheduler_for`), workers
with the V1 model runner `ResumeWorkerExtension.enable_exact_resume`. The V2 runner takes output
from the scheduler as it is, and its chance is a function of seed and position.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

WORKER_EXTENSION = f"{__name__}.ResumeWorkerExtension"

# Keys of `SamplingParams.extra_args`. Requests may not set them: see `vllm_compat.sampling`.
KEY_PREFIX = "shuntyard_"
_NUM_RESUMED = KEY_PREFIX + "num_resumed"
_RESUMED = KEY_PREFIX + "resumed"


def mark_resumed(params: SamplingParams, num_resumed: int) -> None:
    """Say that the last `num_resumed` tokens of the prompt are output."""
    params.extra_args = {**(params.extra_args or {}), _NUM_RESUMED: num_resumed}


def split_resumed(request: Request) -> list[int]:
    """Turn the emitted tokens of a request back into its output; returns them.

    Token ids and block hashes over prompt and output stay what they are. Idempotent.
    """
    params = request.sampling_params
    args: dict[str, Any] = (params.extra_args or {}) if params is not None else {}
    num_resumed = args.pop(_NUM_RESUMED, 0)
    if not num_resumed or request.prompt_token_ids is None:
        return []
    resumed = list(request.prompt_token_ids[-num_resumed:])
    request.prompt_token_ids = request.prompt_token_ids[:-num_resumed]
    request.num_prompt_tokens -= num_resumed
    request._output_token_ids.extend(resumed)
    request.prefill_stats = None  # counts what it finds in the cache as prompt
    args[_RESUMED] = resumed  # for the V1 model runner
    return resumed


class _Resuming(Scheduler):  # type: ignore[misc]
    """A scheduler that takes resumed requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._emitted: dict[str, list[int]] = {}

    def add_request(self, request: Request) -> None:
        resumed = split_resumed(request)
        if resumed and request.structured_output_request is not None:
            self._emitted[request.request_id] = resumed
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Once a resumed request's grammar is compiled, take it over what was emitted."""
        may_run: bool = super()._handle_blocked_waiting_request(request)
        emitted = self._emitted.pop(request.request_id, []) if may_run else []
        if self.structured_output_manager.accept_tokens(request, emitted):
            return may_run
        self.grammar_compile_error_reqs.add(request.request_id)
        return False

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._emitted.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


class ResumingScheduler(_Resuming):
    """For engines without asynchronous scheduling."""


class ResumingAsyncScheduler(_Resuming, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step ahead."""


def scheduler_for(scheduler_config: Any) -> type[Scheduler] | None:
    """The scheduler that resumes exactly, or None if the configuration asks for one of its own."""
    if scheduler_config.scheduler_cls is not None:
        return None
    return ResumingAsyncScheduler if scheduler_config.async_scheduling else ResumingScheduler


class ResumeWorkerExtension:
    """Mixed into vLLM's worker class."""

    def enable_exact_resume(self) -> bool:
        """Call once per worker, before the first request. Returns whether seeds resume as well.

        The V1 model runner on a GPU draws a number per vocabulary entry from the request's
        generator; how many draws the past took is not known there.
        """
        if CachedRequestState.__post_init__ is not _restore_output:
            CachedRequestState.__post_init__ = _restore_output
        is_v1 = isinstance(self.model_runner, GPUModelRunner)  # type: ignore[attr-defined]
        return not is_v1 or current_platform.is_cpu()


_post_init = CachedRequestState.__post_init__


def _restore_output(state: CachedRequestState) -> None:
    """Give the V1 model runner's state of a new request its output, and its generator the past.

    The CPU sampler draws once for each sampled token
    (vllm/v1/sample/ops/topk_topp_sampler.py, `forward_cpu`).
    """
    params = state.sampling_params
    args = (params.extra_args or {}) if params is not None else {}
    resumed = args.get(_RESUMED)
    if resumed and not state.output_token_ids:
        state.output_token_ids.extend(resumed)
        if state.generator is not None and state.generator.device.type == "cpu":
            for _ in resumed:
                torch.randint(0, 2**31, (1,), generator=state.generator, dtype=torch.long)
    _post_init(state)
