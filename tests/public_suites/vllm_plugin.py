"""A pytest plugin under which vLLM's own HTTP tests talk to a server that is already running.

Loaded by run_vllm.py, which sets the VLLM_SUITE_* variables. It stands in for what their tests
take from vLLM's repository: the server they would start, tokenizers and downloads from the hub.
It also writes the outcome of each test to a JSON file.
"""

from __future__ import annotations

import fnmatch
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import openai
import pytest

# What tests.utils and tests.conftest of vLLM's repository are replaced by.
__all__ = [
    "ROCM_ENV_OVERRIDES",
    "ROCM_EXTRA_ARGS",
    "VLLM_PATH",
    "HfRunner",
    "LocalAssetServer",
    "RemoteOpenAIServer",
]

URL = os.environ.get("VLLM_SUITE_URL", "")
TOKENIZERS: dict[str, str] = json.loads(os.environ.get("VLLM_SUITE_TOKENIZERS", "{}"))
RESULTS = os.environ.get("VLLM_SUITE_RESULTS", "")
RULES = tomllib.loads(Path(__file__).with_name("vllm_suite.toml").read_text())

VLLM_PATH = Path("/nonexistent")
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}


class RemoteOpenAIServer:
    """The running server, in the shape of vLLM's class. Skips the tests that need other flags."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: list[str], **_options: Any) -> None:
        for flag in RULES["flags_not_set"]:
            if flag in vllm_serve_args:
                pytest.skip(f"needs a server started with {flag}")
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_exception: object) -> None: ...

    @property
    def url_root(self) -> str:
        return URL

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._defaults(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._defaults(options))

    def _defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        where = {"base_url": f"{URL}/v1", "api_key": self.DUMMY_API_KEY}
        return {"timeout": 280, "max_retries": 0, **where, **options}


class HfRunner:
    """Would run a model in this process, to compare with."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pytest.skip("compares with a model that is not here")


class LocalAssetServer(HfRunner):
    """Would serve pictures."""


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """Used with models that see, which are not served here."""


class _NoHub:
    """Files of the hub are never looked at: adapters are not served here."""

    def snapshot_download(self, *_args: Any, **_options: Any) -> str:
        return "/nonexistent"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any of their modules is imported."""
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils as hub
    from transformers import AutoTokenizer

    get_tokenizer = vllm.tokenizers.get_tokenizer
    from_pretrained = AutoTokenizer.from_pretrained

    def local_tokenizer(tokenizer_name: str, *args: Any, **options: Any) -> Any:
        return get_tokenizer(TOKENIZERS.get(tokenizer_name, tokenizer_name), *args, **options)

    def local_pretrained(name: str, *args: Any, **options: Any) -> Any:
        return from_pretrained(TOKENIZERS.get(name, name), *args, **options)

    vllm.tokenizers.get_tokenizer = local_tokenizer
    AutoTokenizer.from_pretrained = local_pretrained
    hub.hf_api = _NoHub


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(), "suite recorder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in RULES["not_applicable"].items():
            if fnmatch.fnmatchcase(short(item.nodeid), pattern):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


def short(nodeid: str) -> str:
    """The name of a test without the folders of vLLM's repository."""
    path, colons, test = nodeid.partition("::")
    return f"{Path(path).parent.name}/{Path(path).name}{colons}{test}"


class _Recorder:
    """Gathers outcomes and writes them when the session ends."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = short(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            outcome = "failed" if report.failed else report.outcome
            if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
                detail = report.longrepr[2].removeprefix("Skipped: ")
            else:
                detail = str(report.longrepr or "")[-1500:]
            self.results[name] = {"outcome": outcome, "detail": detail}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            detail = str(report.longrepr)[-1500:]
            self.results[short(report.nodeid)] = {"outcome": "failed", "detail": detail}

    def pytest_sessionfinish(self) -> None:
        Path(RESULTS).write_text(json.dumps(self.results, indent=1))
