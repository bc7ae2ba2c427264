from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workflows.graph import find_cycle, topological_order


def test_a_node_comes_after_what_it_depends_on() -> None:
    order = topological_order({"c": {"a", "b"}, "b": {"a"}, "a": set(), "d": set()})
    assert order == ["a", "d", "b", "c"]


def test_a_cycle_is_named_along_its_edges() -> None:
    dependencies = {"a": {"c"}, "b": {"a"}, "c": {"b"}, "d": {"a"}, "e": set[str]()}
    cycle = find_cycle(dependencies)
    assert cycle is not None
    assert cycle[0] == cycle[-1]
    assert len(cycle) == 4
    for earlier, later in pairwise(cycle):
        assert earlier in dependencies[later]


def test_a_node_on_itself_is_a_cycle() -> None:
    assert find_cycle({"a": {"a"}}) == ["a", "a"]


@given(st.dictionaries(st.integers(0, 12), st.sets(st.integers(0, 12))))
def test_there_is_an_order_exactly_if_there_is_no_cycle(raw: dict[int, set[int]]) -> None:
    graph = {str(node): {str(parent) for parent in raw[node] if parent in raw} for node in raw}
    order = topological_order(graph)
    cycle = find_cycle(graph)
    assert (cycle is None) == (len(order) == len(graph))
    for index, node in enumerate(order):
        assert graph[node] <= set(order[:index])
    if cycle is not None:
        assert all(a in graph[b] for a, b in pairwise(cycle))
