"""Settings of the workflows' scheduler that are lists of NAME=VALUE."""

from __future__ import annotations

from collections.abc import Sequence

from workflows.slots import DEFAULT_RESOURCES

_MAX_SLOTS = 100_000


def slots_by_resource(entries: Sequence[str]) -> dict[str, int]:
    """Of `embed=4`. Raises ValueError."""
    names = {one.resource for one in DEFAULT_RESOURCES} - {"llm"}
    found: dict[str, int] = {}
    for entry in entries:
        name, _, count = entry.partition("=")
        if name not in names:
            raise ValueError(f"{entry!r}: the resources are {', '.join(sorted(names))}")
        if not count.isascii() or not count.isdigit() or not 1 <= int(count) <= _MAX_SLOTS:
            raise ValueError(f"{entry!r} is not {name}=N with N from 1 to {_MAX_SLOTS}")
        found[name] = int(count)
    return found


def weights_by_tenant(entries: Sequence[str]) -> dict[str, float]:
    """Of `team=2.5`. Raises ValueError."""
    found: dict[str, float] = {}
    for entry in entries:
        tenant, _, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not tenant or not 0.01 <= weight <= 100:
            raise ValueError(f"{entry!r} is not TENANT=WEIGHT with a weight from 0.01 to 100")
        found[tenant] = weight
    return found
