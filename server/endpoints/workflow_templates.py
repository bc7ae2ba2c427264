"""`/v1/workflow-templates`: workflows that are stored by name, beside those that ship."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from server.asgi import query, read_json, send_json
from server.endpoints.workflow_errors import as_http
from server.errors import TemplateMissing
from server.gateway import Gateway
from server.protocol.workflows import (
    DeletedTemplate,
    TemplateCard,
    TemplateList,
    WorkflowTemplate,
)
from server.record import record_of
from spot.errors import InvalidRequest
from workflows.checked import check_workflow
from workflows.library import NAME, Library
from workflows.operators.base import Operator
from workflows.stores.templates import StoredTemplate, TemplateStore


class Templates:
    """`GET /v1/workflow-templates`: what can be run by name."""

    def __init__(self, library: Library) -> None:
        self._library = library

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with as_http():
            heads = await self._library.heads(record_of(scope).tenant)
        cards = [
            TemplateCard(
                name=one.name,
                version=one.version,
                description=one.description,
                created_at=None if one.created_s is None else round(one.created_s, 3),
            )
            for one in heads
        ]
        await send_json(send, TemplateList(data=cards).model_dump())


class OneTemplate:
    """`GET`, `PUT` and `DELETE /v1/workflow-templates/{name}`."""

    def __init__(
        self, gateway: Gateway, operators: Mapping[str, Operator], library: Library
    ) -> None:
        self._gateway = gateway
        self._operators = operators
        self._library = library

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, name = record_of(scope).tenant, str(scope["path_params"]["name"])
        store = self._library.store
        if scope["method"] == "PUT" and store is not None:
            await self._put(store, tenant, name, scope, receive, send)
        elif scope["method"] == "DELETE" and store is not None:
            await self._delete(store, tenant, name, send)
        else:
            version = _version(scope)
            reference = name if version is None else f"{name}@{version}"
            with as_http():
                found = await self._library.find(tenant, reference)
            await send_json(send, _whole(found))

    async def _put(
        self,
        store: TemplateStore,
        tenant: str,
        name: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                "A template's name has letters, digits, '_', '.' and '-', 64 of them at most, and "
                "begins with a letter or digit.",
                param="name",
            )
        limits = self._gateway.limits
        with self._gateway.admission.request():
            document = await read_json(
                scope,
                receive,
                max_bytes=limits.max_body_bytes,
                max_depth=limits.max_json_depth,
                accepts_yaml=True,
            )
            with as_http():
                check_workflow(document, self._operators)
                stored = await store.put(tenant, name, document)
        await send_json(send, _whole(stored))

    async def _delete(self, store: TemplateStore, tenant: str, name: str, send: Send) -> None:
        with as_http():
            was_there = await store.delete(tenant, name)
        if not was_there:
            raise TemplateMissing(f"There is no stored workflow template {name[:80]!r}.")
        await send_json(send, DeletedTemplate(name=name).model_dump())


def _whole(template: StoredTemplate) -> dict[str, Any]:
    return WorkflowTemplate(
        name=template.name,
        version=template.version,
        description=template.document.get("description"),
        created_at=None if template.created_s is None else round(template.created_s, 3),
        document=dict(template.document),
    ).model_dump()


def _version(scope: Scope) -> int | None:
    """Raises InvalidRequest."""
    asked = query(scope)
    text = asked.get("version", [None])[-1]
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest("version is the number of a version.", param="version")
    return int(text)
