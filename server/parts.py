"""From settings to parts: the model, its tokenizer, the engines, the gateway. Nothing runs yet."""

from __future__ import annotations

import difflib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from server.endpoints.admin import PipelineFactory
from server.fleet_metrics import FleetMetrics
from server.gateway import (
    Admission,
    ChatOptions,
    Gateway,
    Limits,
    ServedModel,
    unix_s,
)
from server.item_metrics import ItemMetrics
from server.journal import Journal
from server.journal_entry import JournalUnusable
from server.journal_metrics import JournalMetrics
from server.metrics import Metrics
from server.model_source import ResolvedModel, resolve_model
from server.pipelines import PipelineMaker
from server.planned_engines import PlannedEngine, read_planned_engines, this_machine
from server.pooling_metrics import PoolingMetrics
from server.pooling_models import ServedPoolingModels
from server.pools import PooledModel, Pools, resolve_pooling_model
from server.sampling import SamplingDefaults
from server.settings import Settings, SettingsError
from server.sse import StreamKeeper
from server.text.tokenizer import ChatTokenizer, read_chat_template, read_generation_config
from server.version import VERSION
from server.workflow_metrics import WorkflowMetrics
from server.workflow_operators import operators_of
from server.workflow_resources import WorkflowResources
from server.workflow_scheduling import build_service, build_slots
from spot.engines.base import Engine
from spot.engines.pooling import PoolingConfig, PoolingEngine
from spot.engines.vllm_compat.flags import read_engine_flags
from spot.errors import InvalidRequest
from spot.failover_policy import FailoverPolicy
from spot.fleet import Fleet
from spot.kept_outputs import KeptOutputs
from workflows.functions import Function, FunctionsUnusable, load_functions
from workflows.operators.base import Operator
from workflows.outbound.addresses import AddressPolicy
from workflows.stores.database import Database

logger = logging.getLogger("shuntyard.engine")

Say = Callable[[str], None]

_LAST_LINES = 30


@dataclass(slots=True)
class Parts:
    """What `serve` runs. last_lines: what the engine's processes wrote last, for a failed start."""

    gateway: Gateway
    fleet: Fleet
    new_pipeline: PipelineFactory
    pooling_engines: list[PoolingEngine]
    pools: Pools
    pooling_metrics: PoolingMetrics
    resources: WorkflowResources
    operators: Mapping[str, Operator]
    last_lines: deque[str]


def build_parts(settings: Settings, engine_flags: list[str], say: Say) -> Parts:
    """Fetches what is missing, loads the tokenizer, and puts everything together.

    say: takes lines of progress. Raises SettingsError, ModelUnavailable, TokenizerError.
    """
    model = resolve_model(
        settings.model, revision=settings.revision, token=settings.hf_token, progress=say
    )
    args = _engine_args(settings, engine_flags, model, say)
    planned = _planned_engines(settings, args, model)
    pools, pooling_engines = _build_pools(settings, say)
    say("loading the tokenizer")
    tokenizer = _load_tokenizer(settings, model.path)
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)
    names = settings.served_model_name or [model.name]
    metrics = Metrics(names[0])
    pipelines = PipelineMaker(
        settings,
        args,
        last_lines,
        vocab_size=tokenizer.vocab_size,
        on_step=metrics.observe_step,
        planned=planned,
    )
    slots = build_slots(settings)
    slots.set_slots("llm", 0)
    kept = _kept_outputs(settings)
    fleet = Fleet(
        pipelines.at_start(),
        policy=_failover_policy(settings),
        on_subnode=slots.attained,
        on_capacity=partial(slots.set_slots, "llm"),
        on_pipelines=(lambda: None) if kept is None else kept.clear,
    )
    slots.on_reprioritise = fleet.reprioritise
    gateway = _build_gateway(settings, model, names, metrics, tokenizer, fleet, kept, say)
    gateway.further_engines = list(pooling_engines)
    gateway.metrics.registry.register(FleetMetrics(fleet))
    if gateway.journal is not None:
        gateway.metrics.registry.register(JournalMetrics(gateway.journal))
    pooling_metrics = PoolingMetrics(gateway.metrics.registry)
    models = ServedPoolingModels(
        pools, names, pooling_metrics, patience_s=settings.no_capacity_timeout
    )
    resources = build_resources(settings, models, say)
    gateway.metrics.registry.register(ItemMetrics(resources.items))
    operators = {one.name: one for one in operators_of(gateway, resources)}
    gateway.workflows = build_service(settings, slots, resources.database, operators)
    gateway.metrics.registry.register(WorkflowMetrics(gateway.workflows))
    return Parts(
        gateway,
        fleet,
        pipelines.make,
        pooling_engines,
        pools,
        pooling_metrics,
        resources,
        operators,
        last_lines,
    )


def build_resources(settings: Settings, models: ServedPoolingModels, say: Say) -> WorkflowResources:
    """What workflows work with; says where their data is. Nothing starts."""
    folder = None if settings.database_url else settings.workflow_data_folder
    when = "at once, for the runs" if settings.workflow_journal else "when a node needs it"
    if folder is None:
        say(f"workflow data: in the database of --database-url, opened {when}")
    else:
        say(f"workflow data: {folder}, where Postgres starts {when}")
    return WorkflowResources(
        models,
        database=Database(
            url=settings.database_url,
            folder=folder,
            max_connections=settings.database_max_connections,
        ),
        identities=settings.journal_identities,
        http_policy=AddressPolicy.parse(settings.workflow_http_allow),
        searxng_url=settings.searxng_url,
        functions=_functions(settings),
    )


def _functions(settings: Settings) -> dict[str, Function]:
    if settings.workflow_functions is None:
        return {}
    try:
        return load_functions(settings.workflow_functions)
    except FunctionsUnusable as error:
        path = settings.workflow_functions
        raise SettingsError(f"--workflow-functions: {path} {error}") from error.__cause__


def _kept_outputs(settings: Settings) -> KeptOutputs | None:
    if not settings.chat_cache_ttl:
        return None
    return KeptOutputs(ttl_s=settings.chat_cache_ttl, max_bytes=settings.chat_cache_bytes)


def _failover_policy(settings: Settings) -> FailoverPolicy:
    return FailoverPolicy(
        max_migrations=settings.max_migrations,
        no_capacity_timeout_s=settings.no_capacity_timeout,
        stall_base_s=settings.stall_timeout,
        subnode_tokens=settings.decode_subnode_tokens,
    )


def _engine_args(
    settings: Settings, engine_flags: list[str], model: ResolvedModel, say: Say
) -> dict[str, Any]:
    if engine_flags:
        say("reading vLLM's engine flags")
    try:
        flags = read_engine_flags(engine_flags)
    except InvalidRequest as error:
        raise SettingsError(error.message + _our_flag_like(engine_flags, error.message)) from None
    args = {**settings.vllm_args(), **flags, "model": str(model.path)}
    if settings.reasoning_parser is not None:
        # A constraint on the output holds only behind the reasoning: the engine must see its end.
        args["reasoning_parser"] = settings.reasoning_parser
    return args


def _planned_engines(
    settings: Settings, args: dict[str, Any], model: ResolvedModel
) -> list[PlannedEngine]:
    if settings.plan is None:
        return []
    return read_planned_engines(settings.plan, model.path, args, this_machine())


def _our_flag_like(engine_flags: list[str], message: str) -> str:
    """A hint at a setting of ours, where an unknown flag looks like a misspelt one."""
    ours = [f"--{name.replace('_', '-')}" for name in Settings.model_fields]
    for argument in engine_flags:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and f"{flag};" in f"{message};":
            close = difflib.get_close_matches(flag, ours, n=1)
            return f" (or {close[0]}?)" if close else ""
    return ""


def _load_tokenizer(settings: Settings, folder: Path) -> ChatTokenizer:
    template = settings.chat_template
    return ChatTokenizer.load(
        Path(settings.tokenizer) if settings.tokenizer else folder,
        chat_template=read_chat_template(template) if template else None,
        trust_remote_code=settings.trust_remote_code,
    )


def _build_gateway(
    settings: Settings,
    model: ResolvedModel,
    names: list[str],
    metrics: Metrics,
    tokenizer: ChatTokenizer,
    engine: Engine,
    kept: KeptOutputs | None,
    say: Say,
) -> Gateway:
    return Gateway(
        model=ServedModel(
            names=names,
            tokenizer=tokenizer,
            engine=engine,
            defaults=_sampling_defaults(settings, model.path),
            chat=_chat_options(settings, tokenizer, say),
            root=model.name,
        ),
        metrics=metrics,
        admission=Admission(
            max_requests=settings.max_concurrent_requests, max_queue=settings.max_queue_length
        ),
        keeper=StreamKeeper(
            keep_alive_s=settings.sse_keep_alive_interval,
            stalled_reader_s=settings.stalled_reader_timeout,
        ),
        limits=Limits(
            max_body_bytes=settings.max_body_bytes,
            max_json_depth=settings.max_json_depth,
            stream_interval=settings.stream_interval,
        ),
        salt_secret=secrets.token_bytes(32) if len(settings.keys_by_tenant) > 1 else None,
        version=VERSION,
        shares_equal=settings.share_equal_requests,
        kept_outputs=kept,
        prefills_ahead=settings.workflow_prefill_ahead,
        patience_s=settings.no_capacity_timeout,
        journal=_open_journal(settings, say),
    )


def _open_journal(settings: Settings, say: Say) -> Journal | None:
    if settings.journal is None:
        return None
    journal = Journal(
        settings.journal,
        now_s=unix_s,
        ttl_s=settings.journal_ttl,
        max_bytes=settings.journal_max_bytes,
        identities=settings.journal_identities,
    )
    try:
        journal.open()
    except JournalUnusable as error:
        raise SettingsError(f"--journal: {error}") from None
    say(f"journal: {settings.journal}, {journal.num_entries} answers to come back for")
    return journal


def _sampling_defaults(settings: Settings, folder: Path) -> SamplingDefaults:
    config: dict[str, Any] = {}
    if settings.generation_config == "auto":
        config = read_generation_config(folder)
    elif settings.generation_config != "vllm":
        config = read_generation_config(Path(settings.generation_config))
    return SamplingDefaults.from_config({**config, **settings.override_generation_config})


def _chat_options(settings: Settings, tokenizer: ChatTokenizer, say: Say) -> ChatOptions:
    options = ChatOptions(
        enable_auto_tool_choice=settings.enable_auto_tool_choice,
        has_tool_parser=settings.tool_call_parser is not None,
        has_reasoning_parser=settings.reasoning_parser is not None,
        default_template_kwargs=settings.default_chat_template_kwargs,
        trust_request_chat_template=settings.trust_request_chat_template,
        exclude_tools_when_none=settings.exclude_tools_when_tool_choice_none,
        response_role=settings.response_role,
        emit_reasoning_content=settings.reasoning_content,
    )
    if settings.tool_call_parser or settings.reasoning_parser:
        say("loading the output parsers")
        from spot.engines.vllm_compat.parsers import load_parser_factory

        try:
            options.parsers = load_parser_factory(
                settings.tool_call_parser, settings.reasoning_parser, tokenizer.hf
            )
        except ValueError as error:
            raise SettingsError(f"--tool-call-parser, --reasoning-parser: {error}") from None
    return options


def _build_pools(settings: Settings, say: Say) -> tuple[Pools, list[PoolingEngine]]:
    pools = Pools()
    engines: list[PoolingEngine] = []
    if settings.embedding_model is not None:
        model, engine = _pooled(settings, settings.embedding_model, "embed", say)
        pools.embedding = PooledModel(
            settings.served_embedding_name or [model.name], engine, model.path
        )
        engines.append(engine)
    if settings.rerank_model is not None:
        model, engine = _pooled(settings, settings.rerank_model, "score", say)
        pools.rerank = PooledModel(settings.served_rerank_name or [model.name], engine, model.path)
        engines.append(engine)
    return pools, engines


def _pooled(
    settings: Settings, name: str, task: Literal["embed", "score"], say: Say
) -> tuple[ResolvedModel, PoolingEngine]:
    model = resolve_pooling_model(name, token=settings.hf_token, progress=say)
    config = PoolingConfig(
        model=str(model.path),
        task=task,
        trust_remote_code=settings.trust_remote_code,
        max_queue=settings.max_pooling_queue,
        max_silence_s=settings.engine_max_silence,
        stall_timeout_s=settings.engine_stall_timeout,
    )
    return model, PoolingEngine(config, on_line=lambda line: logger.debug("%s", line))
