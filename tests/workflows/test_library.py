from __future__ import annotations

import pytest

from workflows.errors import TemplateNotFound
from workflows.library import Library, shipped_templates

pytestmark = pytest.mark.anyio


async def test_shipped_ones_are_found_by_name_and_as_version_0() -> None:
    library = Library(None)
    for name, document in shipped_templates().items():
        for reference in (name, f"{name}@0"):
            found = await library.find("t", reference)
            assert (found.name, found.version, found.document) == (name, 0, document)
    assert [one.name for one in await library.heads("t")] == sorted(shipped_templates())


@pytest.mark.parametrize("name", ["rga", "rag@1", "rag@", "rag@x", "", "../rag", "rag@0@0"])
async def test_what_is_not_there_is_an_error_with_a_hint(name: str) -> None:
    with pytest.raises(TemplateNotFound, match="rag"):
        await Library(None).find("t", name)
