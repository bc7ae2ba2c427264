"""What is kept, for whom, and what makes room."""

from __future__ import annotations

import hypothesis.strategies as st
import orjson
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.responses_store import ResponsesStore, StoredItem, StoredResponse, joined


def response(name: str, *, size: int = 0) -> StoredResponse:
    item = StoredItem.of({"id": f"item-{name}", "text": "x" * size})
    return StoredResponse(name, b"{}", (), (item,))


def test_what_was_put_is_found() -> None:
    store = ResponsesStore()
    store.put("a", response("one"))
    found = store.get("a", "one")
    assert found is not None
    assert store.item("a", "item-one") == found.output[0]
    assert orjson.loads(joined(found.output)) == [{"id": "item-one", "text": ""}]


def test_tenants_do_not_see_each_other() -> None:
    store = ResponsesStore()
    store.put("a", response("one"))
    assert store.get("b", "one") is None
    assert store.item("b", "item-one") is None
    assert not store.delete("b", "one")
    assert store.get("a", "one") is not None


def test_what_is_deleted_is_gone_with_its_items() -> None:
    store = ResponsesStore()
    store.put("a", response("one"))
    assert store.delete("a", "one")
    assert not store.delete("a", "one")
    assert store.get("a", "one") is None
    assert store.item("a", "item-one") is None
    assert (store.num_responses, store.num_bytes) == (0, 0)


def test_the_count_is_bounded_and_what_was_used_longest_ago_goes() -> None:
    store = ResponsesStore(max_responses=2)
    store.put("a", response("one"))
    store.put("a", response("two"))
    assert store.get("a", "one") is not None
    store.put("a", response("three"))
    assert store.get("a", "two") is None
    assert store.get("a", "one") is not None
    assert store.get("a", "three") is not None


def test_the_bytes_are_bounded() -> None:
    room = 3 * response("r0", size=1000).num_bytes
    store = ResponsesStore(max_bytes=room)
    for number in range(10):
        store.put("a", response(f"r{number}", size=1000))
        assert store.num_bytes <= room
    assert store.num_responses == 3


def test_what_is_larger_than_everything_is_not_kept_and_pushes_nothing_out() -> None:
    store = ResponsesStore(max_bytes=5000)
    store.put("a", response("small"))
    store.put("a", response("huge", size=10_000))
    assert store.get("a", "huge") is None
    assert store.get("a", "small") is not None


def test_a_tenant_with_much_does_not_push_out_one_with_little() -> None:
    store = ResponsesStore(max_responses=10)
    store.put("small", response("mine"))
    for number in range(100):
        store.put("large", response(f"r{number}"))
    assert store.get("small", "mine") is not None
    assert store.num_responses == 10


class StoreMachine(RuleBasedStateMachine):
    """The totals are those of what can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponsesStore(max_responses=5, max_bytes=8000)
        self.put: dict[tuple[str, str], StoredResponse] = {}

    @rule(tenant=st.sampled_from("abc"), size=st.integers(0, 6000))
    def add(self, tenant: str, size: int) -> None:
        name = f"r{len(self.put)}"
        self.put[tenant, name] = response(name, size=size)
        self.store.put(tenant, self.put[tenant, name])

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 20))
    def delete(self, tenant: str, number: int) -> None:
        known = self.store.get(tenant, f"r{number}") is not None
        assert self.store.delete(tenant, f"r{number}") == known

    @invariant()
    def totals_agree(self) -> None:
        found = [item for key, item in self.put.items() if self.store.get(*key) is not None]
        assert self.store.num_responses == len(found) <= 5
        assert self.store.num_bytes == sum(item.num_bytes for item in found) <= 8000


TestStoreMachine = StoreMachine.TestCase
