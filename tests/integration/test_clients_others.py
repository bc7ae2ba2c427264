"""Client libraries and load generators, each in a process and an environment of its own.

What they do is in tests/clients: one script each, which fails by its exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from server.demo_model import ensure_demo_model
from tests.clients import environments
from tests.clients.live_server import MODEL, LiveServer
from tests.harness import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.contract,
    pytest.mark.timeout(1500),  # the first run installs the clients
]

SCRIPT_TIMEOUT_S = 240


def tokenizer_folder() -> str:
    return os.environ.get("SHUNTYARD_TEST_MODEL") or str(ensure_demo_model())


@pytest.fixture(scope="session")
def client_python() -> Path:
    return environments.client_python()


@pytest.fixture(scope="session")
def node_modules() -> None:
    if reason := environments.missing_for_js():
        pytest.skip(reason)
    environments.install_js()


def run_script(live: LiveServer, interpreter: str, script: Path, *further: str) -> str:
    """Run to the end; afterwards nothing of it may be left in the server."""
    output = environments.run(
        [interpreter, str(script), live.base_url, MODEL, *further],
        cwd=script.parent,
        timeout_s=SCRIPT_TIMEOUT_S,
    )
    until(lambda: live.load == 0 and live.num_running == 0)
    return output


@pytest.mark.parametrize(
    "name", ["langchain_client", "instructor_client", "pydantic_ai_client", "litellm_client"]
)
def test_python_client(live: LiveServer, client_python: Path, name: str) -> None:
    run_script(live, str(client_python), environments.HERE / "python" / f"{name}.py")


def test_lm_eval(live: LiveServer, client_python: Path) -> None:
    script = environments.HERE / "python" / "lm_eval_client.py"
    run_script(live, str(client_python), script, tokenizer_folder())


def test_vllm_bench_serve(live: LiveServer) -> None:
    script = environments.HERE / "python" / "vllm_bench.py"
    run_script(live, sys.executable, script, tokenizer_folder())


@pytest.mark.parametrize("name", ["openai", "ai_sdk"])
def test_javascript_client(live: LiveServer, node_modules: None, name: str) -> None:
    assert "all passed" in run_script(live, "node", environments.JS / f"{name}.mjs")


def test_a_failing_client_is_noticed(live: LiveServer, tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import sys; raise AssertionError(sys.argv[2])")
    with pytest.raises(AssertionError, match=f"exited with 1(.|\n)*{MODEL}"):
        run_script(live, sys.executable, script)
