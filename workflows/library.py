"""Workflows by name: those that ship, and those that a tenant has stored in their place or beside.

A name is `rag`, or `rag@3` for one version. Stored ones have versions from 1, shipped ones have 0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from workflows.errors import TemplateNotFound
from workflows.stores.templates import StoredTemplate, TemplateStore

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_REFERENCE = re.compile(rf"({NAME.pattern})(?:@([0-9]{{1,9}}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHead:
    """created_s: unix seconds; None for a shipped one, whose version is 0."""

    name: str
    version: int
    description: str | None
    created_s: float | None


@cache
def shipped_templates() -> Mapping[str, dict[str, Any]]:
    """The documents that ship, by name. They must not be changed."""
    documents = [
        yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in sorted(resources.files("workflows.shipped").iterdir(), key=lambda one: one.name)
        if file.name.endswith(".yaml")
    ]
    return {document["name"]: document for document in documents}


class Library:
    """store: of what tenants have stored; None where nothing can be."""

    def __init__(self, store: TemplateStore | None) -> None:
        self.store = store

    async def find(self, tenant: str, reference: str) -> StoredTemplate:
        """The newest version of a name, or the one that is named.

        Raises TemplateNotFound, and the store's errors.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is not None:
            name, version = match[1], None if match[2] is None else int(match[2])
            found = await self._find(tenant, name, version)
            if found is not None:
                return found
        raise TemplateNotFound(
            f"there is no workflow template {reference[:80]!r}"
            + _hint(reference, await self.heads(tenant))
        )

    async def _find(self, tenant: str, name: str, version: int | None) -> StoredTemplate | None:
        if self.store is not None and version != 0:
            stored = await self.store.find(tenant, name, version)
            if stored is not None:
                return stored
        document = shipped_templates().get(name)
        if document is None or version not in (None, 0):
            return None
        return StoredTemplate(name=name, version=0, document=document, created_s=None)

    async def heads(self, tenant: str) -> list[TemplateHead]:
        """What `find` finds without a version, by name."""
        heads = {
            name: TemplateHead(
                name=name, version=0, description=document["description"], created_s=None
            )
            for name, document in shipped_templates().items()
        }
        if self.store is not None:
            for one in await self.store.newest(tenant):
                heads[one.name] = TemplateHead(
                    name=one.name,
                    version=one.version,
                    description=one.document.get("description"),
                    created_s=one.created_s,
                )
        return [heads[name] for name in sorted(heads)]


def _hint(reference: str, heads: Sequence[TemplateHead]) -> str:
    wanted, names = reference.partition("@")[0], [one.name for one in heads]
    same = next((one for one in heads if one.name == wanted), None)
    if same is not None:
        return f"; the newest version of {wanted!r} is {same.version}"
    close = difflib.get_close_matches(wanted, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
