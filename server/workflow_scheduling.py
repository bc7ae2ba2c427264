"""The workflows' scheduler, and the service around it, as the settings want them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from server.gateway import wall_s
from server.slot_settings import slots_by_resource, weights_by_tenant
from workflows.checked import check_workflow
from workflows.operators.base import Operator
from workflows.run_journal import RunJournal
from workflows.scheduling.messages import CapacityChanged
from workflows.scheduling.parameters import preset
from workflows.service import WorkflowService
from workflows.slots import DEFAULT_RESOURCES, Slots
from workflows.stores.database import Database
from workflows.stores.runs import RunStore

if TYPE_CHECKING:
    from server.settings import Settings


def build_slots(settings: Settings) -> Slots:
    """Slots of everything but `llm`, which the fleet tells."""
    parameters = preset(settings.workflow_preset, policy=settings.workflow_policy)
    wanted = slots_by_resource(settings.workflow_slots)
    resources = [_limited(one, settings, wanted) for one in DEFAULT_RESOURCES]
    return Slots(
        parameters=parameters,
        weights=weights_by_tenant(settings.workflow_tenant_weights),
        resources=resources,
        patience_s=settings.no_capacity_timeout,
    )


def build_service(
    settings: Settings, slots: Slots, database: Database, operators: Mapping[str, Operator]
) -> WorkflowService:
    """What runs workflows; with a journal in `database`, if the settings have one."""
    journal = None
    if settings.workflow_journal:
        journal = RunJournal(
            RunStore(database),
            now_wall_s=wall_s,
            identities=settings.journal_identities,
            tenants=list(settings.keys_by_tenant.values()) or [""],
            ttl_s=settings.workflow_retention,
            max_bytes=settings.workflow_retention_bytes,
        )
    return WorkflowService(
        slots,
        max_active=settings.workflow_max_active,
        max_kept=settings.workflow_max_kept,
        max_kept_s=settings.workflow_keep,
        max_cache_bytes=settings.workflow_cache_bytes,
        max_nested=settings.workflow_max_nested,
        max_run_bytes=settings.workflow_max_run_bytes,
        max_kept_bytes=settings.workflow_max_kept_bytes,
        journal=journal,
        compiled=None if journal is None else lambda document: check_workflow(document, operators),
    )


def _limited(one: CapacityChanged, settings: Settings, wanted: dict[str, int]) -> CapacityChanged:
    one = replace(one, num_slots=wanted.get(one.resource, one.num_slots))
    if one.max_batch > 1:
        one = replace(
            one,
            max_batch=settings.workflow_max_batch,
            max_wait_s=settings.workflow_batch_wait,
        )
    return one
