"""All settings, read once: flags over environment (`SHUNTYARD_*`) over a TOML or YAML file."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from server.slot_settings import slots_by_resource, weights_by_tenant
from spot.errors import ShuntyardError
from workflows.json_values import MAX_DEPTH
from workflows.outbound.addresses import AddressPolicy

ENV_PREFIX = "SHUNTYARD_"
# Variables of ours that are not settings of the server.
_OTHER_VARIABLES = {"SHUNTYARD_CACHE_DIR", "SHUNTYARD_TEST_MODEL", "SHUNTYARD_CONFIG"}

SERVE, PIPELINES, HTTP, OPENAI, LIMITS, JOURNAL, WORKFLOWS, ENGINE, LOGS = (
    "what is served",
    "pipelines",
    "HTTP",
    "OpenAI behaviour",
    "limits",
    "journal",
    "workflows",
    "engine (vLLM's flags; all others of vLLM are accepted too)",
    "logs and traces",
)

# Settings about the engine that are not arguments of vLLM's.
_ABOUT_ENGINE = {
    "engine_args",
    "engine_start_timeout",
    "engine_step_timeout",
    "engine_max_silence",
    "engine_stall_timeout",
}


_LENGTH = re.compile(r"auto|-1|(?P<number>\d+(\.\d+)?)[kKmMgGtT]?")


class SettingsError(ShuntyardError):
    """A setting has a value that cannot be used. The message names the key."""


def _setting(default: Any, text: str, *, group: str, **bounds: Any) -> Any:
    return Field(default=default, description=text, json_schema_extra={"group": group}, **bounds)


def _words(value: Any) -> Any:
    """A list in an environment variable: JSON, or words with commas or spaces between them."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return value.replace(",", " ").split()


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


NumberText = Annotated[str, BeforeValidator(_number_as_text)]
Words = Annotated[list[str], NoDecode, BeforeValidator(_words)]


class Settings(BaseSettings):
    """Everything that `shuntyard serve` can be told."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str | None = _setting(
        None, "folder or hub name of the model; without one the demo model", group=SERVE
    )
    served_model_name: Words = _setting(
        [], "names under which clients know the model; the first is the main one", group=SERVE
    )
    tokenizer: str | None = _setting(None, "folder of another tokenizer", group=SERVE)
    revision: str | None = _setting(None, "branch, tag or commit on the hub", group=SERVE)
    hf_token: str | None = _setting(None, "token for gated models on the hub", group=SERVE)
    share_equal_requests: bool = _setting(
        True,
        "equal requests of a tenant that run at once are generated once, where they are "
        "deterministic (temperature 0 or a seed)",
        group=SERVE,
    )
    chat_cache_ttl: float = _setting(
        0.0,
        "seconds for which the answer to a deterministic request is replayed to equal ones of its "
        "tenant; 0 for never",
        group=SERVE,
        ge=0,
    )
    chat_cache_bytes: int = _setting(
        64 * 1024 * 1024,
        "outputs that are kept for that; those used longest ago go first",
        group=SERVE,
        ge=0,
    )
    embedding_model: str | None = _setting(
        None,
        "folder or hub name of an embedding model to serve as well; 'demo' for a small one",
        group=SERVE,
    )
    served_embedding_name: Words = _setting(
        [], "names of the embedding model for clients", group=SERVE
    )
    rerank_model: str | None = _setting(
        None, "folder or hub name of a cross-encoder to serve for rerank and score", group=SERVE
    )
    served_rerank_name: Words = _setting([], "names of the rerank model for clients", group=SERVE)

    pipelines: int | None = _setting(
        None,
        "engines of the model on this machine (default: 1, or 0 with --upstream)",
        group=PIPELINES,
        ge=0,
        le=64,
    )
    plan: Path | None = _setting(
        None,
        "plan of `shuntyard plan --output` to run: its pipelines, on this machine",
        group=PIPELINES,
    )
    upstream: Words = _setting(
        [],
        "vLLM or Shuntyard servers that serve the same model, as URL or URL=WEIGHT",
        group=PIPELINES,
    )
    upstream_api_key: str | None = _setting(
        None, "key that the upstream servers want", group=PIPELINES
    )
    upstream_model: str | None = _setting(
        None, "the model's name there, where an upstream serves several", group=PIPELINES
    )
    upstream_max_num_seqs: int = _setting(
        256, "generations given to one upstream at a time", group=PIPELINES, ge=1
    )
    no_capacity_timeout: float = _setting(
        120.0,
        "seconds that a running answer waits for a pipeline when all are lost",
        group=PIPELINES,
        ge=0,
    )
    max_migrations: int = _setting(
        32, "times that one answer may lose its pipeline and go on elsewhere", group=PIPELINES, ge=0
    )
    stall_timeout: float = _setting(
        15.0,
        "seconds without any token, beside what prompts and usual steps take, until a pipeline "
        "counts as hanging",
        group=PIPELINES,
        gt=0,
    )
    decode_subnode_tokens: int | None = _setting(
        None,
        "tokens after which a running answer may give its seat to a more urgent one "
        "(default: about half a second's worth)",
        group=PIPELINES,
        ge=1,
    )
    admin_key: str | None = _setting(
        None, "key of the admin API; without one it is for this machine only", group=PIPELINES
    )

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for all", group=HTTP)
    port: int = _setting(8000, "port to listen on; 0 picks a free one", group=HTTP, ge=0, le=65535)
    uds: str | None = _setting(None, "listen on this Unix socket instead", group=HTTP)
    api_key: Words = _setting(
        [], "keys that are let in, as KEY or TENANT:KEY; without any, everyone is", group=HTTP
    )
    root_path: str = _setting("", "path prefix that a proxy in front strips", group=HTTP)
    allowed_origins: Words = _setting([], "origins that browsers may call from", group=HTTP)
    allowed_methods: Words = _setting(["*"], "methods allowed to them", group=HTTP)
    allowed_headers: Words = _setting(["*"], "headers allowed to them", group=HTTP)
    allow_credentials: bool = _setting(False, "allow them credentials", group=HTTP)
    ssl_keyfile: Path | None = _setting(None, "TLS key file", group=HTTP)
    ssl_certfile: Path | None = _setting(None, "TLS certificate file", group=HTTP)
    open_metrics: bool = _setting(True, "serve /metrics without a key", group=HTTP)
    docs: bool = _setting(True, "serve /docs, /redoc and /openapi.json", group=HTTP)
    keep_alive_timeout: float = _setting(
        75.0, "seconds that an idle connection stays open", group=HTTP, gt=0
    )
    sse_keep_alive_interval: float = _setting(
        15.0,
        "seconds of silence before a comment is sent on a stream; 0 for never",
        group=HTTP,
        ge=0,
    )
    shutdown_timeout: float = _setting(
        30.0, "seconds that running requests get to finish at shutdown", group=HTTP, ge=0
    )

    enable_auto_tool_choice: bool = _setting(
        False, "let the model decide to call tools; needs --tool-call-parser", group=OPENAI
    )
    tool_call_parser: str | None = _setting(
        None, "vLLM's parser for the model's tool calls (hermes, llama3_json, …)", group=OPENAI
    )
    reasoning_parser: str | None = _setting(
        None, "vLLM's parser for the model's reasoning (deepseek_r1, qwen3, …)", group=OPENAI
    )
    reasoning_content: bool = _setting(
        True, "repeat reasoning under the older name reasoning_content", group=OPENAI
    )
    chat_template: str | None = _setting(
        None, "file with a chat template, or the template itself", group=OPENAI
    )
    default_chat_template_kwargs: dict[str, Any] = _setting(
        {}, "JSON object of arguments for the chat template", group=OPENAI
    )
    trust_request_chat_template: bool = _setting(
        False, "let requests bring a chat template", group=OPENAI
    )
    exclude_tools_when_tool_choice_none: bool = _setting(
        False, "hide tools from the template when tool_choice is none", group=OPENAI
    )
    response_role: str = _setting("assistant", "role of the answer", group=OPENAI)
    generation_config: str = _setting(
        "auto",
        "auto: the model's own sampling defaults; vllm: OpenAI's; or a folder",
        group=OPENAI,
    )
    override_generation_config: dict[str, Any] = _setting(
        {}, "JSON object of sampling defaults, over the model's", group=OPENAI
    )
    stream_interval: int = _setting(
        1, "tokens to gather before a chunk is sent", group=OPENAI, ge=1
    )

    max_concurrent_requests: int = _setting(
        4096, "requests being answered at once; more get 429", group=LIMITS, ge=1
    )
    max_queue_length: int = _setting(
        2048,
        "generations waiting for the engine; more get 429, but one request alone may bring more",
        group=LIMITS,
        ge=0,
    )
    max_pooling_queue: int = _setting(
        20_000,
        "inputs waiting for an embedding or rerank model; more get 429",
        group=LIMITS,
        ge=1,
    )
    max_body_bytes: int = _setting(
        16 * 1024 * 1024, "size of a request body; more gets 413", group=LIMITS, ge=1024
    )
    max_json_depth: int = _setting(128, "nesting of a JSON body", group=LIMITS, ge=4, le=MAX_DEPTH)
    body_timeout: float = _setting(
        60.0,
        "seconds for a request's head to arrive, and then its body; more gets 408",
        group=LIMITS,
        gt=0,
    )
    stalled_reader_timeout: float = _setting(
        300.0, "seconds that a client may not read its stream", group=LIMITS, gt=0
    )

    journal: Path | None = _setting(
        None,
        "folder in which answers are kept while they are made, so that a client that comes back "
        "with its x-request-id gets the rest, also after a crash of the server",
        group=JOURNAL,
    )
    journal_ttl: float = _setting(
        3600.0, "seconds that an answer is kept there after its end", group=JOURNAL, gt=0
    )
    journal_max_bytes: int = _setting(
        1024**3,
        "size of the folder; then the oldest answers go, and after these new ones are not kept",
        group=JOURNAL,
        ge=1024 * 1024,
    )

    workflow_data: Path | None = _setting(
        None,
        "folder of the embedded Postgres that keeps collections and runs "
        "(default: ~/.local/share/shuntyard/workflows, /var/lib/shuntyard/workflows for root)",
        group=WORKFLOWS,
    )
    database_url: str | None = _setting(
        None,
        "use this Postgres with pgvector instead, as postgresql://USER:PASSWORD@HOST/NAME",
        group=WORKFLOWS,
    )
    database_max_connections: int = _setting(
        10, "connections to Postgres held at once", group=WORKFLOWS, ge=2, le=1000
    )
    workflow_journal: bool = _setting(
        True,
        "keep runs in Postgres, so that they go on after a crash or restart of the server; without "
        "it they are in memory only",
        group=WORKFLOWS,
    )
    workflow_retention: float = _setting(
        7 * 86400.0,
        "seconds that a run is kept there after its end, with its idempotency key",
        group=WORKFLOWS,
        gt=0,
    )
    workflow_retention_bytes: int = _setting(
        10 * 1024**3,
        "size of the runs that have ended; beyond it the oldest go",
        group=WORKFLOWS,
        ge=1024 * 1024,
    )
    workflow_prefill_ahead: bool = _setting(
        True,
        "while seats are free, let the engine read what is known of a node's prompt before the "
        "rest is there",
        group=WORKFLOWS,
    )
    workflow_max_batch: int = _setting(
        64, "texts or pairs of concurrent nodes in one batch", group=WORKFLOWS, ge=1, le=4096
    )
    workflow_batch_wait: float = _setting(
        0.003,
        "seconds that a text or pair waits for others while a batch of its model runs",
        group=WORKFLOWS,
        ge=0,
        le=1,
    )
    workflow_policy: Literal["hera", "fcfs", "srtf", "plas"] = _setting(
        "hera",
        "which ready node gets the next slot: hera (short and awaited ones first, with a bound on "
        "waiting), fcfs (the first that was ready), srtf (of the run with the least work left), "
        "plas (of the run that had the least service)",
        group=WORKFLOWS,
    )
    workflow_preset: Literal["balanced", "short-first", "throughput", "tail-fairness"] = _setting(
        "balanced",
        "what the policy hera weighs most: short-first (low median), throughput, tail-fairness",
        group=WORKFLOWS,
    )
    workflow_tenant_weights: Words = _setting(
        [],
        "shares of the slots when tenants compete, as TENANT=WEIGHT; 1 for those not named",
        group=WORKFLOWS,
    )
    workflow_slots: Words = _setting(
        [],
        "nodes or batches at once, as RESOURCE=N (default: embed=1 rerank=1 search=8 http=64 "
        "web_search=8; that of llm is what the pipelines take)",
        group=WORKFLOWS,
    )
    workflow_max_active: int = _setting(
        1000, "runs at once; further ones are refused", group=WORKFLOWS, ge=1
    )
    workflow_max_nested: int = _setting(
        10_000, "runs inside one run (map, loop, workflow)", group=WORKFLOWS, ge=1
    )
    workflow_max_run_bytes: int = _setting(
        64 * 1024 * 1024, "outputs of the nodes of one run, as JSON", group=WORKFLOWS, ge=1024
    )
    workflow_max_kept: int = _setting(
        1000, "ended runs that can still be asked for", group=WORKFLOWS, ge=0
    )
    workflow_keep: float = _setting(
        3600.0, "seconds for which they can be asked for", group=WORKFLOWS, ge=0
    )
    workflow_max_kept_bytes: int = _setting(
        256 * 1024 * 1024, "outputs of all ended runs; then the oldest go", group=WORKFLOWS, ge=0
    )
    workflow_cache_bytes: int = _setting(
        64 * 1024 * 1024,
        "results of nodes with `cache` that are kept; those used longest ago go first",
        group=WORKFLOWS,
        ge=0,
    )
    workflow_http_allow: Words = _setting(
        [],
        "addresses, ranges (10.1.0.0/16) and names (*.corp.example) inside, where http nodes may "
        "go; by default only to the public internet",
        group=WORKFLOWS,
    )
    workflow_functions: Path | None = _setting(
        None,
        "Python file with functions that python nodes may call, marked with "
        "workflows.functions.function",
        group=WORKFLOWS,
    )
    searxng_url: str | None = _setting(
        None, "SearXNG server that web_search nodes ask; it must offer JSON", group=WORKFLOWS
    )

    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = _setting(
        None, "type of the weights and activations", group=ENGINE
    )
    max_model_len: NumberText | None = _setting(
        None,
        "context length in tokens (8192; 8K is 8192, 8k is 8000; auto: what memory allows)",
        group=ENGINE,
    )
    max_num_seqs: int | None = _setting(None, "generations that run at once", group=ENGINE, ge=1)
    max_num_batched_tokens: int | None = _setting(
        None, "tokens of one engine step", group=ENGINE, ge=1
    )
    tensor_parallel_size: int | None = _setting(
        None, "GPUs that share each layer", group=ENGINE, ge=1
    )
    pipeline_parallel_size: int | None = _setting(
        None, "stages of consecutive layers", group=ENGINE, ge=1
    )
    gpu_memory_utilization: float | None = _setting(
        None, "share of GPU memory to use, 0 to 1", group=ENGINE, gt=0, le=1
    )
    quantization: str | None = _setting(None, "how the weights are quantised", group=ENGINE)
    kv_cache_dtype: str | None = _setting(None, "type of the KV cache", group=ENGINE)
    seed: int | None = _setting(None, "seed of requests without one", group=ENGINE)
    enforce_eager: bool | None = _setting(None, "do not compile or capture graphs", group=ENGINE)
    enable_prefix_caching: bool | None = _setting(
        None, "reuse the KV cache of equal prefixes", group=ENGINE
    )
    trust_remote_code: bool = _setting(
        False, "run code that the model's folder brings", group=ENGINE
    )
    engine_args: dict[str, Any] = _setting(
        {}, "JSON object of further vLLM engine arguments, by name", group=ENGINE
    )
    engine_start_timeout: float = _setting(
        1800.0, "seconds until the engine must be ready", group=ENGINE, gt=0
    )

    engine_step_timeout: float = _setting(
        300.0,
        "seconds without an engine step, while it holds work, until it is started anew",
        group=ENGINE,
        gt=0,
    )

    engine_max_silence: float = _setting(
        10.0,
        "seconds without a sign of life from an engine's process until /health is 503",
        group=ENGINE,
        gt=0,
    )
    engine_stall_timeout: float = _setting(
        30.0,
        "seconds without a sign of life from an engine's process until it is started anew",
        group=ENGINE,
        gt=0,
    )

    log_format: Literal["auto", "json", "pretty"] = _setting(
        "auto", "one JSON object a line, or for people; auto: by the terminal", group=LOGS
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "least severe level that is logged", group=LOGS
    )
    log_requests: bool = _setting(True, "log one line per request", group=LOGS)
    otlp_traces_endpoint: str | None = _setting(
        None, "send OpenTelemetry traces to this OTLP/HTTP address", group=LOGS
    )

    @field_validator("api_key")
    @classmethod
    def _no_empty_keys(cls, value: list[str]) -> list[str]:
        if any(not key.strip() or not key.split(":", 1)[-1] for key in value):
            raise ValueError("a key must not be empty")
        return value

    @field_validator("max_model_len")
    @classmethod
    def _is_length(cls, value: str | None) -> str | None:
        found = _LENGTH.fullmatch(value or "auto")
        if not found or (found["number"] and float(found["number"]) <= 0):
            raise ValueError("must be a positive number of tokens (8192, 8K) or auto")
        return value

    @field_validator("workflow_http_allow")
    @classmethod
    def _are_targets(cls, value: list[str]) -> list[str]:
        AddressPolicy.parse(value)
        return value

    @field_validator("workflow_slots")
    @classmethod
    def _are_slots(cls, value: list[str]) -> list[str]:
        slots_by_resource(value)
        return value

    @field_validator("workflow_tenant_weights")
    @classmethod
    def _are_weights(cls, value: list[str]) -> list[str]:
        weights_by_tenant(value)
        return value

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("postgresql://", "postgres://")):
            raise ValueError("must start with postgresql://")
        return value

    @field_validator("searxng_url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/]", value):
            raise ValueError("must start with http:// or https://")
        return value

    @field_validator("root_path")
    @classmethod
    def _rooted(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("must start with /")
        return value.rstrip("/")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = (init_settings, env_settings)
        path = os.environ.get("SHUNTYARD_CONFIG")
        if not path:
            return sources
        return (*sources, InitSettingsSource(settings_cls, init_kwargs=read_config(Path(path))))

    @property
    def keys_by_tenant(self) -> dict[str, str]:
        """Tenant names by key; a key without a name is its own, unnamed tenant."""
        tenants: dict[str, str] = {}
        for position, entry in enumerate(self.api_key, start=1):
            tenant, colon, key = entry.partition(":")
            tenants[key if colon else entry] = tenant if colon else f"key-{position}"
        return tenants

    @property
    def workflow_data_folder(self) -> Path:
        """Where the embedded Postgres is, if it is used."""
        if self.workflow_data is not None:
            return self.workflow_data.expanduser()
        if os.geteuid() == 0:  # what is below /root, Postgres' user could not reach
            return Path("/var/lib/shuntyard/workflows")
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(base).expanduser() / "shuntyard" / "workflows"

    @property
    def workflow_profile_file(self) -> Path:
        """Where it is kept what nodes' work takes."""
        return self.workflow_data_folder / "profile.json"

    @property
    def journal_identities(self) -> dict[str, str]:
        """What journal and database call tenants without a name: by their key, since their number
        changes with the order of the keys."""
        return {
            tenant: "key:" + hashlib.sha256(key.encode()).hexdigest()[:32]
            for key, tenant in self.keys_by_tenant.items()
            if key in self.api_key
        }

    def vllm_args(self) -> dict[str, Any]:
        """The engine's arguments by vLLM's names, without what was left to vLLM."""
        named = {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if group_of(info) == ENGINE and name not in _ABOUT_ENGINE
        }
        if not self.trust_remote_code:
            named.pop("trust_remote_code")
        given = {name: value for name, value in named.items() if value is not None}
        return {**given, **{k.replace("-", "_"): v for k, v in self.engine_args.items()}}


def group_of(info: pydantic.fields.FieldInfo) -> str:
    """The heading under which a setting is shown."""
    extra = info.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def load_settings(
    flags: Mapping[str, Any], *, config: str | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Settings from flags, environment and file. Raises SettingsError that names the key."""
    path = config or environ.get("SHUNTYARD_CONFIG")
    if path and not Path(path).is_file():
        raise SettingsError(f"--config: there is no file {path}")
    if path:
        os.environ["SHUNTYARD_CONFIG"] = path
    _check_environment(environ)
    try:
        return Settings(**flags)
    except pydantic.ValidationError as error:
        raise SettingsError(_explain(error)) from None
    except (ValueError, OSError) as error:
        raise SettingsError(str(error)) from None


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a TOML or YAML file; names may be spelt with hyphens, as vLLM's are.

    Raises SettingsError that names the file, for what is not a mapping and for unknown names.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(
            f"--config: {path} cannot be read: {' '.join(str(error).split())}"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"--config: {path} must hold names and values")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name not in Settings.model_fields:
            close = difflib.get_close_matches(name, Settings.model_fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(
                f"--config: {path}: there is no setting {name}{hint} "
                "(other vLLM arguments go under engine_args)"
            )
    return values


def _check_environment(environ: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | _OTHER_VARIABLES
    for name in environ:
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(
                f"the environment variable {name} is no setting of Shuntyard{hint} "
                "(other vLLM arguments go into SHUNTYARD_ENGINE_ARGS as JSON)"
            )


def _explain(error: pydantic.ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else "settings"
        flag, variable = f"--{name.replace('_', '-')}", ENV_PREFIX + name.upper()
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, Settings.model_fields, n=1)
            message = f"there is no such setting{f'; did you mean {close[0]}?' if close else ''}"
        is_secret = "key" in name or "token" in name or name == "database_url"
        shown = "" if is_secret else f" (got {str(item['input'])[:80]!r})"
        lines.append(f"{flag} ({variable}): {message}{shown}")
    return "\n".join(lines)
