"""A result is held as long as one of the runs that have used it is active, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from workflows.held_results import Finished, HeldResults
from workflows.operators.base import NodeResult


def finished(number: int = 0) -> Finished:
    return Finished(NodeResult(output={"n": number}), "")


def test_the_last_run_takes_the_result_along() -> None:
    results, one = HeldResults(), finished()
    for run_id in ("a", "b"):
        results.hold("k", one, run_id)
    results.release("a")
    assert results.find("k") is one
    results.release("b")
    assert results.find("k") is None
    assert len(results) == 0


def test_an_equal_result_that_comes_later_is_not_held_beside_the_first() -> None:
    results, first = HeldResults(), finished()
    results.hold("k", first, "a")
    results.hold("k", finished(), "b")
    results.release("a")
    assert results.find("k") is first


def test_a_run_that_has_used_nothing_releases_nothing() -> None:
    results = HeldResults()
    results.hold("k", finished(), "a")
    results.release("b")
    results.release("b")
    assert len(results) == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["hold", "release"]), st.integers(0, 3), st.integers(0, 3)),
    max_size=60,
)


@given(steps=STEPS)
def test_there_is_a_result_exactly_while_a_run_uses_it(
    steps: list[tuple[str, int, int]],
) -> None:
    results = HeldResults()
    users: dict[str, set[str]] = {}
    for action, key_number, run_number in steps:
        key, run_id = f"k{key_number}", f"r{run_number}"
        if action == "hold":
            results.hold(key, finished(key_number), run_id)
            users.setdefault(key, set()).add(run_id)
        else:
            results.release(run_id)
            users = {name: rest for name, one in users.items() if (rest := one - {run_id})}
        assert len(results) == len(users)
        for number in range(4):
            found = results.find(f"k{number}")
            assert (found is not None) == (f"k{number}" in users)
            assert found is None or found.result.output == {"n": number}
    for run_number in range(4):
        results.release(f"r{run_number}")
    assert len(results) == 0
    assert not results._keys
