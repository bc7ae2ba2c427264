"""Texts in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.workflows.pooling_fakes import FakeModel
from workflows.chunking import Chunking, num_special_tokens, split_texts
from workflows.errors import NodeFailed
from workflows.operators.ingest import ChunkParams, chunking_for

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


def test_chunks_end_where_the_text_does(tokenizer_file: Path) -> None:
    def chunks(unit: str, size: int, overlap: int = 0) -> list[str]:
        chunking = Chunking(unit=unit, size=size, overlap=overlap)  # type: ignore[arg-type]
        return split_texts([TEXT], chunking, tokenizer_file)[0]

    paragraphs = ["One is first. Two comes next.", "Three stands alone here. Four ends it."]
    sentences = ["One is first.", "Two comes next.", "Three stands alone here.", "Four ends it."]
    assert chunks("tokens", 7) == paragraphs
    assert chunks("tokens", 4) == sentences
    assert chunks("characters", 40) == paragraphs
    assert chunks("characters", 25) == sentences
    assert chunks("tokens", 100) == [TEXT]


def test_chunks_overlap_by_whole_sentences() -> None:
    chunking = Chunking(unit="characters", size=14, overlap=7)
    (chunks,) = split_texts(["A b c. D e f. G h i. J k l."], chunking, None)
    assert chunks == ["A b c. D e f.", "D e f. G h i.", "G h i. J k l."]


def test_long_texts_are_cut_as_well(tokenizer_file: Path) -> None:
    """Also where words, and so tokens, are much shorter in one part than in the others."""
    plain = "The quick brown fox jumps over the lazy dog. " * 600
    dense = "A b c d e f g h i j k l m n o p q r s t u v w x y z. " * 300
    chunking = Chunking(unit="tokens", size=100, overlap=0)
    chunks, none = split_texts([plain + dense + plain, ""], chunking, tokenizer_file)
    assert " ".join(chunks) == (plain + dense + plain).strip()
    sizes = [len(chunk.split()) for chunk in chunks]
    assert max(sizes) <= 100
    assert len(chunks) < 1.5 * sum(sizes) / 100
    assert all(chunk.endswith(".") for chunk in chunks)
    assert none == []
    overlapping = Chunking(unit="tokens", size=100, overlap=30)
    (more,) = split_texts([plain], overlapping, tokenizer_file)
    assert more[1].startswith("The quick brown fox")
    assert sum(len(chunk.split()) for chunk in more) > 1.1 * len(plain.split())


def test_nothing_gives_no_chunk(tokenizer_file: Path) -> None:
    chunking = Chunking(unit="tokens", size=5, overlap=0)
    assert split_texts(["", " \n ", "a"], chunking, tokenizer_file) == [[], [], ["a"]]


def test_a_word_without_end_is_cut(tokenizer_file: Path) -> None:
    chunking = Chunking(unit="characters", size=10, overlap=0)
    (chunks,) = split_texts(["x" * 95], chunking, None)
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
