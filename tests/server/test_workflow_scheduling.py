"""The scheduler's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.settings import Settings, SettingsError, load_settings
from server.workflow_scheduling import build_service, build_slots
from workflows.scheduling.parameters import preset
from workflows.stores.database import Database


def settings(**flags: Any) -> Settings:
    return load_settings(flags, environ={})


def test_slots_are_those_of_the_settings() -> None:
    slots = build_slots(
        settings(
            workflow_policy="srtf",
            workflow_preset="short-first",
            workflow_slots=["search=3", "embed=2"],
            workflow_max_batch=7,
            workflow_batch_wait=0.5,
        )
    )
    assert slots.parameters == preset("short-first", policy="srtf")
    resources = slots.resources
    assert {name: one.num_slots for name, one in resources.items() if name != "llm"} == {
        "embed": 2,
        "rerank": 1,
        "search": 3,
        "http": 64,
        "web_search": 8,
    }
    assert {name for name, one in resources.items() if one.max_batch == 7} == {"embed", "rerank"}
    assert resources["rerank"].max_wait_s == 0.5
    assert resources["search"].max_batch == 1


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("workflow_slots", "llm=3"),
        ("workflow_slots", "search"),
        ("workflow_slots", "search=0"),
        ("workflow_slots", "serach=3"),
        ("workflow_tenant_weights", "team"),
        ("workflow_tenant_weights", "team=0"),
        ("workflow_tenant_weights", "team=much"),
        ("workflow_tenant_weights", "=2"),
    ],
)
def test_a_wrong_entry_stops_the_start_and_is_named(name: str, entry: str) -> None:
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}"):
        settings(**{name: [entry]})


def test_the_limits_of_runs_are_those_of_the_settings() -> None:
    given = settings(workflow_max_active=3, workflow_cache_bytes=1000)
    database = Database(folder=Path("unused"))
    service = build_service(given, build_slots(given), database, {})
    assert service._max_active == 3
    assert service.shared_work._max_bytes == 1000
