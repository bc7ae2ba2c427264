"""Request sizes and prompts of the load test."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from loadtest.trace import DEFAULT_TRACE, RequestSize, prompt_of, read_trace, sample
from server.text.tokenizer import ChatTokenizer


def scaled(prompt: int, output: int, *, limit: int = 1000, scale: float = 1.0) -> RequestSize:
    size = RequestSize(prompt, output)
    return size.scaled(prompt_scale=scale, output_scale=scale, limit=limit)


@pytest.fixture
def trace_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return path

    return write


def test_the_excerpt_has_two_thousand_plausible_rows() -> None:
    sizes = read_trace(DEFAULT_TRACE)
    assert len(sizes) == 2000
    assert sizes[0] == RequestSize(374, 44)
    assert all(size.num_output_tokens > 0 for size in sizes)


def test_the_excerpt_comes_with_its_licence() -> None:
    folder = DEFAULT_TRACE.parent
    assert "AzurePublicDataset" in (folder / "README.md").read_text()
    assert "CC-BY" in (folder / "LICENSE-CC-BY-4.0").name


def test_rows_are_read_in_order(trace_file: Callable[[str], Path]) -> None:
    path = trace_file("TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,6\ny,7,8\n")
    assert read_trace(path) == [RequestSize(5, 6), RequestSize(7, 8)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "a,b\n1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nx,five,6\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nx,5\n",
    ],
)
def test_a_file_that_is_no_trace_is_refused(trace_file: Callable[[str], Path], text: str) -> None:
    with pytest.raises(ValueError, match=r"trace\.csv"):
        read_trace(trace_file(text))


def test_equal_seeds_draw_equal_sizes() -> None:
    sizes = read_trace()
    first, second = (list(islice(sample(sizes, random.Random(3)), 50)) for _ in range(2))
    other = list(islice(sample(sizes, random.Random(4)), 50))
    assert first == second
    assert first != other
    assert set(first) <= set(sizes)


def test_samples_keep_the_trace_s_mean() -> None:
    sizes = read_trace()
    drawn = list(islice(sample(sizes, random.Random(1)), 20_000))
    mean = sum(size.num_prompt_tokens for size in sizes) / len(sizes)
    drawn_mean = sum(size.num_prompt_tokens for size in drawn) / len(drawn)
    assert drawn_mean == pytest.approx(mean, rel=0.05)


def test_scaling_is_proportional() -> None:
    assert scaled(200, 100, scale=0.1) == RequestSize(20, 10)


def test_scaling_never_reaches_zero() -> None:
    assert scaled(3, 2, scale=0.01) == RequestSize(1, 1)


def test_a_prompt_gives_way_to_its_output() -> None:
    assert scaled(5000, 300) == RequestSize(700, 300)


@pytest.mark.parametrize("limit", [2, 10, 500])
def test_scaled_sizes_fit_the_limit(limit: int) -> None:
    for size in read_trace():
        fitted = size.scaled(prompt_scale=1, output_scale=1, limit=limit)
        assert fitted.num_prompt_tokens + fitted.num_output_tokens <= limit
        assert min(fitted.num_prompt_tokens, fitted.num_output_tokens) >= 1


@pytest.mark.parametrize("num_tokens", [1, 20, 500, 3000])
def test_a_prompt_has_about_the_tokens_asked_for(tokenizer: ChatTokenizer, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, random.Random(2))
    found = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert found == pytest.approx(num_tokens, rel=0.03, abs=1)


def test_prompts_differ() -> None:
    rng = random.Random(1)
    assert len({prompt_of(30, rng) for _ in range(100)}) == 100
