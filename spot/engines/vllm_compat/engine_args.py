"""vLLM's engine flags under their own names, from a command line or a mapping to a config."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import pydantic
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from spot.engines.vllm_compat.resume import WORKER_EXTENSION, scheduler_for
from spot.errors import EngineMisconfigured

_MIN_BATCHED_TOKENS = 4096

# One backend for every constrained request: with "auto" the first request decides for all.
# Priorities are equal unless a generation says otherwise, and equal priorities are served in order.
_DEFAULTS: dict[str, Any] = {
    "scheduling_policy": "priority",
    "structured_outputs_config": {"backend": "xgrammar"},
}

# A seeded request whose prefill is chunked ends vLLM 0.32's CPU engine. Compilation costs a CPU
# start more than it gives. Small blocks make resuming a generation nearly free.
_CPU_DEFAULTS: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "enforce_eager": True,
    "block_size": 32,
}


class _FlagParser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's own parser, which raises instead of exiting and knows what was meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0].split("=")[0]
            raise EngineMisconfigured(f"unknown engine flag {flag}{self._suggest(flag)}")
        raise EngineMisconfigured(_one_line(message.removeprefix("argument ")))

    def _suggest(self, flag: str) -> str:
        close = difflib.get_close_matches(flag, self._option_string_actions, n=3)
        return f"; did you mean {' or '.join(close)}?" if close else ""


def parse_engine_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The flags that `argv` sets, by their Python names, as JSON values.

    Raises EngineMisconfigured for an unknown flag or an impossible value, naming it.
    """
    namespace: argparse.Namespace = _parser(keep_json=True).parse_args(list(argv))
    return vars(namespace)


def with_defaults(args: Mapping[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    """`args` with what Shuntyard sets where the user did not."""
    defaults = _DEFAULTS | (_CPU_DEFAULTS if is_cpu else {})
    return defaults | {name.replace("-", "_"): value for name, value in args.items()}


def build_config(args: Mapping[str, Any]) -> Any:
    """The VllmConfig for flags given by name. Reads the model's config.

    Raises EngineMisconfigured for what vLLM does not take, or what it raises for a model.
    """
    is_cpu = current_platform.is_cpu()
    complete = with_defaults(args, is_cpu=is_cpu)
    parser = _parser(keep_json=False)
    namespace = parser.parse_args(_to_argv(parser, complete))
    try:
        engine_args = AsyncEngineArgs.from_cli_args(namespace)
        if is_cpu:
            _fit_prompts_in_one_step(engine_args)
            _run_worker_in_engine_core(engine_args)
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except pydantic.ValidationError as error:
        raise EngineMisconfigured(_explain(error, args)) from error
    _resume_exactly(config)
    return config


def _resume_exactly(config: Any) -> None:
    """Let the engine take generations that have output already, where nothing else is asked for.

    A scheduler or worker extension of the user's own stays: such an engine cannot resume exactly.
    """
    scheduler = scheduler_for(config.scheduler_config)
    if scheduler is not None and not config.parallel_config.worker_extension_cls:
        config.scheduler_config.scheduler_cls = scheduler
        config.parallel_config.worker_extension_cls = WORKER_EXTENSION


def _explain(error: pydantic.ValidationError, args: Mapping[str, Any]) -> str:
    """The first complaint of vLLM's validation in one line, with the flag that it is about.

    Checks that compare several values name none of them as such: then the flag is the one among
    `args` whose name stands first in the complaint.
    """
    complaint = error.errors(include_url=False, include_context=False)[0]
    message = _one_line(complaint["msg"].removeprefix("Value error, "))
    if complaint["loc"]:
        name = str(complaint["loc"][0])
        return f"{_as_flag(name)}: {message} (got {str(complaint['input'])[:80]!r})"
    places = {name: _place(name, message) for name in args}
    found = [name for name in args if places[name] >= 0 and name != "model"]
    if not found:
        return message
    return f"{_as_flag(min(found, key=places.__getitem__))}: {message}"


def _place(name: str, message: str) -> int:
    """Where a complaint names an argument, in vLLM's spelling or in words; -1 if it does not."""
    spellings = (name, name.replace("_", "-"), name.replace("_", " "))
    places = [message.lower().find(spelling) for spelling in spellings]
    return min((place for place in places if place >= 0), default=-1)


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fit_prompts_in_one_step(engine_args: AsyncEngineArgs) -> None:
    """Without chunked prefill a step must take the longest prompt."""
    if engine_args.enable_chunked_prefill:
        return
    if engine_args.max_num_batched_tokens is None:
        max_model_len = engine_args.create_model_config().max_model_len
        engine_args.max_num_batched_tokens = max(_MIN_BATCHED_TOKENS, max_model_len)


def _run_worker_in_engine_core(engine_args: AsyncEngineArgs) -> None:
    """Save the worker process where there is only one.

    vLLM gives each CPU worker a process, to bind its threads; the engine core then spins while it
    waits for the worker, on a core that should compute. Threads that are not bound need none.
    """
    is_alone = (
        engine_args.tensor_parallel_size
        * engine_args.pipeline_parallel_size
        * engine_args.data_parallel_size
        == 1
    )
    is_bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    if is_alone and not is_bound and engine_args.distributed_executor_backend is None:
        engine_args.distributed_executor_backend = UniProcExecutor


def _parser(*, keep_json: bool) -> _FlagParser:
    """A parser for vLLM's engine flags that reports only the flags that are set.

    keep_json: give flags with structured values as plain JSON rather than as vLLM's objects.
    """
    parser = _FlagParser(prog="engine flags", add_help=False, allow_abbrev=False)
    AsyncEngineArgs.add_cli_args(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if keep_json and action.type is not None:
            action.type = _as_json(action.type)
    return parser


def _as_json(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, but with a value that JSON cannot hold given as the JSON that was parsed."""

    def parse_to_json(text: str) -> Any:
        value = parse(text)
        try:
            json.dumps(value)
        except TypeError:
            return json.loads(text)
        return value

    return parse_to_json


def _to_argv(parser: _FlagParser, args: Mapping[str, Any]) -> list[str]:
    """The command line that says `args`. None means: not set."""
    actions = {action.dest: action for action in parser._actions}
    argv: list[str] = []
    for name, value in args.items():
        if name not in actions:
            parser.error(f"unrecognized arguments: {_as_flag(name)}")
        if value is not None:
            argv += _flag(actions[name], value)
    return argv


def _flag(action: argparse.Action, value: Any) -> list[str]:
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if isinstance(value, bool):
        if value or not isinstance(action, argparse.BooleanOptionalAction):
            return [flag] if value else []
        return [next(option for option in action.option_strings if option.startswith("--no-"))]
    if isinstance(value, list | tuple) and action.nargs in ("+", "*"):
        return [flag, *map(_text, value)]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
