"""The packages that we import are ours, not namesakes from the package index."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "name", ["server", "workflows", "spot", "placement", "tensorstore", "loadtest"]
)
def test_each_package_is_ours(name: str) -> None:
    found = importlib.import_module(name).__file__
    assert found is not None
    assert Path(found).resolve() == ROOT / name / "__init__.py"


def test_every_folder_of_tests_is_a_package() -> None:
    """Otherwise two files of one name cannot be collected together."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
