"""Texts in chunks."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.workflows.pooling_fakes import FakeModel
from workflows.chunking import Chunking, num_special_tokens, split_texts
from workflows.errors import NodeFailed
from workflows.operators.ingest import ChunkParams, chunking_for

pytestmark = pytest.mark.anyio

TEXT = "One is first. Two comes next.\n\nThree stands alone here. Four ends it."


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each word, two special ones, and a truncation that must not count."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(4)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


async def test_chunks_end_where_the_text_does(tokenizer_file: Path) -> None:
    async def chunks(unit: str, size: int, overlap: int = 0) -> list[str]:
        chunking = Chunking(unit=unit, size=size, overlap=overlap)  # type: ignore[arg-type]
        return (await split_texts([TEXT], chunking, tokenizer_file))[0]

    paragraphs = ["One is first. Two comes next.", "Three stands alone here. Four ends it."]
    sentences = ["One is first.", "Two comes next.", "Three stands alone here.", "Four ends it."]
    assert await chunks("tokens", 7) == paragraphs
    assert await chunks("tokens", 4) == sentences
    assert await chunks("characters", 40) == paragraphs
    assert await chunks("characters", 25) == sentences
    assert await chunks("tokens", 100) == [TEXT]


async def test_chunks_overlap_by_whole_sentences() -> None:
    chunking = Chunking(unit="characters", size=14, overlap=7)
    (chunks,) = await split_texts(["A b c. D e f. G h i. J k l."], chunking, None)
    assert chunks == ["A b c. D e f.", "D e f. G h i.", "G h i. J k l."]


async def test_long_texts_are_cut_as_well(tokenizer_file: Path) -> None:
    """Also where words, and so tokens, are much shorter in one part than in the others."""
    plain = "The quick brown fox jumps over the lazy dog. " * 600
    dense = "A b c d e f g h i j k l m n o p q r s t u v w x y z. " * 300
    chunking = Chunking(unit="tokens", size=100, overlap=0)
    chunks, none = await split_texts([plain + dense + plain, ""], chunking, tokenizer_file)
    assert " ".join(chunks) == (plain + dense + plain).strip()
    sizes = [len(chunk.split()) for chunk in chunks]
    assert max(sizes) <= 100
    assert len(chunks) < 1.5 * sum(sizes) / 100
    assert all(chunk.endswith(".") for chunk in chunks)
    assert none == []
    overlapping = Chunking(unit="tokens", size=100, overlap=30)
    (more,) = await split_texts([plain], overlapping, tokenizer_file)
    assert more[1].startswith("The quick brown fox")
    assert sum(len(chunk.split()) for chunk in more) > 1.1 * len(plain.split())


async def test_nothing_gives_no_chunk(tokenizer_file: Path) -> None:
    chunking = Chunking(unit="tokens", size=5, overlap=0)
    assert await split_texts(["", " \n ", "a"], chunking, tokenizer_file) == [[], [], ["a"]]


async def test_a_word_without_end_is_cut(tokenizer_file: Path) -> None:
    chunking = Chunking(unit="characters", size=10, overlap=0)
    (chunks,) = await split_texts(["x" * 95], chunking, None)
    assert "".join(chunks) == "x" * 95
    assert max(map(len, chunks)) == 10


def test_defaults_fit_the_model(tokenizer_file: Path) -> None:
    model = FakeModel(max_tokens=64, tokenizer_file=tokenizer_file)
    assert num_special_tokens(tokenizer_file) == 2
    assert chunking_for(ChunkParams(), model) == Chunking(unit="tokens", size=62, overlap=7)
    model.max_tokens = 512
    assert chunking_for(ChunkParams(), model) == Chunking(unit="tokens", size=256, overlap=32)
    wanted = ChunkParams(unit="characters", size=100, overlap=0)
    assert chunking_for(wanted, model) == Chunking(unit="characters", size=100, overlap=0)


def test_what_cannot_be_is_told(tokenizer_file: Path) -> None:
    model = FakeModel(max_tokens=64, tokenizer_file=tokenizer_file)
    with pytest.raises(NodeFailed, match="at most 62 tokens"):
        chunking_for(ChunkParams(size=63), model)
    with pytest.raises(NodeFailed, match="below the size, which is 10"):
        chunking_for(ChunkParams(size=10, overlap=10), model)
    with pytest.raises(NodeFailed, match="use characters"):
        chunking_for(ChunkParams(), FakeModel())


SNIPPETS = [
    *(
        "a",
        "B",
        "word",
        "etc. ",
        "End. ",
        "3.14",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\u00a0",
        "\x1c",
    ),
    *("e\u0301", "\U0001f1e9\U0001f1ea", "\u6f22\u5b57\u3002", "\u0e20\u0e32\u0e29\u0e32"),
    *("x" * 300, " " * 300, "1 " * 200, "A b c. " * 60, "line\n" * 60),
]


@given(st.lists(st.sampled_from(SNIPPETS), max_size=12), st.integers(1, 60), st.data())
def test_long_texts_are_cut_as_the_library_cuts_them(
    snippets: list[str], size: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, size - 1))
    text = "".join(snippets)
    chunking = Chunking(unit="characters", size=size, overlap=overlap)
    (chunks,) = anyio.run(split_texts, [text], chunking, None)
    assert chunks == TextSplitter(size, overlap=overlap).chunks(text)
    assert all(len(chunk) <= size for chunk in chunks)


async def test_chunks_cover_the_text_and_overlap_by_no_more_than_asked_for() -> None:
    text = "".join(chr(0x4E00 + place) for place in range(5000))
    chunking = Chunking(unit="characters", size=50, overlap=49)
    (chunks,) = await split_texts([text], chunking, None)
    places = [(text.index(chunk), text.index(chunk) + len(chunk)) for chunk in chunks]
    assert (places[0][0], places[-1][1]) == (0, len(text))
    assert all(
        0 <= before[1] - after[0] <= 49 and before[0] < after[0]
        for before, after in pairwise(places)
    )


@pytest.mark.parametrize("text", ["a" * 50_000, "a\n" * 25_000, "the quick brown " * 3_125])
async def test_the_time_is_in_proportion_to_the_text(text: str) -> None:
    begun_s = time.monotonic()
    (chunks,) = await split_texts([text], Chunking(unit="characters", size=1, overlap=0), None)
    assert "".join(chunks) == "".join(text.split())
    assert time.monotonic() - begun_s < 10  # it was 30 s, alone on a fast machine


async def test_words_without_end_are_cut_by_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chunking = Chunking(unit="tokens", size=7, overlap=0)
    (chunks,) = await split_texts(["ab" * 8_000], chunking, tmp_path / "tokenizer.json")
    assert "".join(chunks) == "ab" * 8_000
    assert {len(chunk) for chunk in chunks[:-1]} == {7}


async def test_too_many_pieces_are_refused() -> None:
    chunking = Chunking(unit="characters", size=1, overlap=0)
    assert await split_texts(["abc"], chunking, None, max_pieces=3) == [["a", "b", "c"]]
    with pytest.raises(NodeFailed, match="more than 3 pieces: raise the size") as refused:
        await split_texts(["abc", "d"], chunking, None, max_pieces=3)
    assert refused.value.code == "invalid_params"


async def test_pieces_that_repeat_the_text_without_measure_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workflows.chunking._FREE_CHARS", 0)
    chunking = Chunking(unit="characters", size=2_000, overlap=1_999)
    with pytest.raises(NodeFailed, match="too long to cut: raise the size, lower the overlap"):
        await split_texts(["a" * 10_000], chunking, None)


async def test_short_texts_do_not_wait_for_long_ones_which_stop_when_cancelled() -> None:
    hard = Chunking(unit="characters", size=2_000, overlap=1_900)
    easy = Chunking(unit="characters", size=2, overlap=0)
    async with anyio.create_task_group() as tasks:
        for _ in range(45):
            tasks.start_soon(split_texts, ["a b" * 1_000_000], hard, None)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(20):
            assert await split_texts(["abc"], easy, None) == [["ab", "c"]]
        tasks.cancel_scope.cancel()
    with anyio.fail_after(5):
        assert await split_texts(["abc"], easy, None) == [["ab", "c"]]
