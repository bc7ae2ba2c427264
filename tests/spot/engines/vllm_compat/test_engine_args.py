"""vLLM's engine flags under their own names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from server.demo_model import ensure_demo_model
from spot.engines.vllm_compat.engine_args import (
    _parser,
    _run_worker_in_engine_core,
    _to_argv,
    build_config,
    parse_engine_flags,
    with_defaults,
)
from spot.errors import EngineMisconfigured


def round_trip(args: dict[str, Any]) -> AsyncEngineArgs:
    """What vLLM gets for flags given by name."""
    parser = _parser(keep_json=False)
    return AsyncEngineArgs.from_cli_args(parser.parse_args(_to_argv(parser, args)))


def test_only_the_flags_that_are_set_are_reported() -> None:
    argv = ["--model", "m", "--max-model-len", "2k", "--enforce-eager", "--dtype=float32"]
    assert parse_engine_flags(argv) == {
        "model": "m",
        "max_model_len": 2000,
        "enforce_eager": True,
        "dtype": "float32",
    }


def test_underscores_and_negations_are_understood() -> None:
    assert parse_engine_flags(["--max_num_seqs", "4", "--no-enable-prefix-caching"]) == {
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }


def test_structured_values_come_as_json() -> None:
    argv = ["--structured-outputs-config.backend", "guidance", "--hf-overrides", '{"a": 1}']
    args = parse_engine_flags(argv)
    assert args == {"structured_outputs_config": {"backend": "guidance"}, "hf_overrides": {"a": 1}}
    json.dumps(args)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-modle-len", "5"], "--max-modle-len; did you mean --max-model-len"),
        (["--max-model", "5"], "unknown engine flag --max-model"),
        (["stray"], "unknown engine flag stray"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--dtype", "float3"], "--dtype"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_an_error_that_names_it(argv: list[str], message: str) -> None:
    with pytest.raises(EngineMisconfigured, match=message):
        parse_engine_flags(argv)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_logprobs": -7}, r"--max-logprobs: Input should be .* -1 \(got '?-7'?\)"),
        ({"max_model_len": 999_999}, r"--max-model-len: .*greater than the derived"),
        ({"quantization": "zip"}, r"--quantization: Unknown quantization method: zip"),
        ({"kv_cache_dtype": "zip"}, r"--kv-cache-dtype: invalid choice: 'zip'"),
    ],
)
def test_a_value_that_vllm_refuses_is_told_in_one_line_with_its_flag(
    args: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineMisconfigured) as caught:
        build_config({"model": str(ensure_demo_model()), **args})
    assert re.match(message, caught.value.message)
    assert "\n" not in caught.value.message


def test_values_by_name_reach_vllm() -> None:
    args = round_trip(
        {
            "model": "m",
            "max_model_len": 128,
            "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": False,
            "structured_outputs_config": {"backend": "guidance"},
            "served_model_name": ["a", "b"],
            "revision": None,
        }
    )
    assert (args.model, args.max_model_len, args.gpu_memory_utilization) == ("m", 128, 0.5)
    assert args.enable_prefix_caching is False
    assert args.structured_outputs_config.backend == "guidance"
    assert args.served_model_name == ["a", "b"]
    assert args.revision is None


def test_what_the_command_line_says_reaches_vllm_unchanged() -> None:
    argv = ["--model=m", "--max-num-batched-tokens=4k", "--compilation-config.mode=0"]
    args = round_trip(parse_engine_flags(argv))
    assert args.max_num_batched_tokens == 4000
    assert int(args.compilation_config.mode) == 0


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(EngineMisconfigured, match="--max-lenght"):
        round_trip({"max_lenght": 4})


def test_defaults_yield_to_what_the_user_set() -> None:
    args = with_defaults({"block-size": 64, "enable_chunked_prefill": True}, is_cpu=True)
    assert args["block_size"] == 64
    assert args["enable_chunked_prefill"] is True
    assert args["enforce_eager"] is True
    assert args["scheduling_policy"] == "priority"


def test_cpu_defaults_are_for_cpus() -> None:
    assert "enable_chunked_prefill" not in with_defaults({}, is_cpu=False)
    assert with_defaults({}, is_cpu=True)["enable_chunked_prefill"] is False


@pytest.mark.parametrize(
    ("threads", "changes", "expected"),
    [
        ("nobind", {}, UniProcExecutor),
        ("auto", {}, None),
        ("nobind", {"tensor_parallel_size": 2}, None),
        ("nobind", {"distributed_executor_backend": "mp"}, "mp"),
    ],
)
def test_a_single_worker_lives_in_the_engine_core(
    monkeypatch: pytest.MonkeyPatch, threads: str, changes: dict[str, Any], expected: object
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", threads)
    args = round_trip({"model": "m", **changes})
    _run_worker_in_engine_core(args)
    assert args.distributed_executor_backend == expected


def test_every_default_is_a_flag_of_vllm() -> None:
    round_trip(with_defaults({}, is_cpu=True))
