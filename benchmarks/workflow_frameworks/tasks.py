"""What each kind of run does, in numbers and prompts that all systems share.

    rag         the KEPT nearest passages -> answer
    rag_rerank  the CANDIDATES nearest passages -> the KEPT best -> answer
    web         question -> query by the model -> WEB_RESULTS results -> answer
    research    passages near the question, and near its topic; web results for the question, and
                for its topic; of each list the best one by the question -> short answer from
                excerpts of the four

Two renderings of one text: `str.format` for Python, and with expressions of a template language put
in for what they stand for.
"""

from __future__ import annotations

from typing import Final

CANDIDATES: Final = 8
KEPT: Final = 2
WEB_RESULTS: Final = 3
RESEARCH_WEB_RESULTS: Final = 6
EXCERPT_CHARACTERS: Final = 160

# Of a research run's texts, in the order of its excerpts.
SOURCES: Final = ("documents", "topic_documents", "web", "topic_web")

ANSWER_MAX_TOKENS: Final = 24
SHORT_ANSWER_MAX_TOKENS: Final = 8
QUERY_MAX_TOKENS: Final = 16

ANSWER_SYSTEM: Final = "Answer the question in a few words, from the passages."
ANSWER_USER: Final = "Passages:\n{passages}\n\nQuestion: {question}"
QUERY_SYSTEM: Final = "Rewrite the question as a short query for a web search engine."
QUERY_STOP: Final = "\n"
PASSAGE_SEPARATOR: Final = "\n\n"


def answer_user(question: str, passages: list[str]) -> str:
    """The user's message of an answer."""
    return ANSWER_USER.format(passages=PASSAGE_SEPARATOR.join(passages), question=question)


def excerpts(lists: list[list[str]]) -> list[str]:
    """The beginning of the first of each list, where there is one."""
    return [texts[0][:EXCERPT_CHARACTERS] for texts in lists if texts]
