"""What the endpoints answer, as models for the OpenAPI document and for tests.

Nothing is built from these while serving: the endpoints write their JSON themselves, for speed. The
contract tests hold every answer against them. A field with a default may be absent.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
CompletionFinishReason = Literal["stop", "length"]


class ResponseBody(BaseModel):
    """A part of an answer. `model_` names are OpenAI's, not pydantic's."""

    model_config = ConfigDict(protected_namespaces=())


class ErrorPlace(ResponseBody):
    """One of several things that are wrong."""

    path: str
    code: str
    message: str


class ErrorDetail(ResponseBody):
    """What went wrong. `param` is the dotted path of the field that is to blame.

    details: all that is wrong with a workflow.
    """

    message: str
    type: ErrorType
    param: str | None
    code: str | None
    details: list[ErrorPlace] | None = None


class ErrorResponse(ResponseBody):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class PromptTokensDetails(ResponseBody):
    cached_tokens: int = Field(ge=0)


class Usage(ResponseBody):
    """Token counts, over all choices; special tokens count."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(ResponseBody):
    """One alternative at a position. `bytes` is the token in UTF-8, maybe a part of a character."""

    token: str
    logprob: float = Field(le=0, ge=-9999)
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class PromptLogprob(ResponseBody):
    """vLLM's figures of one token at one prompt position."""

    logprob: float = Field(le=0, ge=-9999)
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnsweredFunction(ResponseBody):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class AnsweredToolCall(ResponseBody):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(ResponseBody):
    """The model's turn. The thinking text comes under both of its common names."""

    role: str
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredToolCall] | None = Field(default=None, min_length=1)


class ChatChoice(ResponseBody):
    index: int = Field(ge=0)
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseBody):
    id: str = Field(pattern="^chatcmpl-")
    object: Literal["chat.completion"]
    created: int = Field(ge=0)
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(ResponseBody):
    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseBody):
    """A piece of a call. `id`, `type` and the name come once, with its first piece."""

    index: int = Field(ge=0)
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseBody):
    """What a chunk adds to the message. The role comes once, first."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = Field(default=None, min_length=1)


class ChatChunkChoice(ResponseBody):
    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Extension(ResponseBody):
    """What OpenAI's fields have no place for; beside the usage.

    migrations: how often the generations of this answer lost their pipeline and went on elsewhere.
    """

    migrations: int = Field(ge=0)


class ChatCompletionChunk(ResponseBody):
    """One event of a streamed chat completion. The one with the usage has no choices."""

    id: str = Field(pattern="^chatcmpl-")
    object: Literal["chat.completion.chunk"]
    created: int = Field(ge=0)
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    shuntyard: Extension | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(ResponseBody):
    """Four lists of equal length. The first echoed token has no figures."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(ResponseBody):
    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ResponseBody):
    """Choice `i` belongs to prompt `i // n`."""

    id: str = Field(pattern="^cmpl-")
    object: Literal["text_completion"]
    created: int = Field(ge=0)
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage
    system_fingerprint: str | None = None


class CompletionChunkChoice(ResponseBody):
    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(ResponseBody):
    """One event of a streamed text completion. The one with the usage has no choices."""

    id: str = Field(pattern="^cmpl-")
    object: Literal["text_completion"]
    created: int = Field(ge=0)
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    shuntyard: Extension | None = None
    system_fingerprint: str | None = None


class ModelCard(ResponseBody):
    """A served model. The last three are vLLM's, and only the generative model has them."""

    id: str
    object: Literal["model"]
    created: int = Field(ge=0)
    owned_by: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelCards(ResponseBody):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(ResponseBody):
    count: int = Field(ge=0)
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseBody):
    prompt: str


class ReadyResponse(ResponseBody):
    status: Literal["ready"]
    model: str


class LoadResponse(ResponseBody):
    """Requests being answered, streams included."""

    server_load: int = Field(ge=0)


class VersionResponse(ResponseBody):
    """instance: of this run of the server, by which it knows itself. upstreams: the instances that
    it may pass requests on to, at once or through others."""

    version: str
    instance: str
    upstreams: list[str]


class PoolingUsage(ResponseBody):
    """Tokens that a pooling model has read."""

    prompt_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class Embedding(ResponseBody):
    """One vector: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int = Field(ge=0)
    embedding: list[float] | str


class EmbeddingList(ResponseBody):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RankedDocument(ResponseBody):
    text: str


class RerankResult(ResponseBody):
    """One document; `index` is its place in the request."""

    index: int = Field(ge=0)
    document: RankedDocument | None = None
    relevance_score: float


class RerankResponse(ResponseBody):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class PairScore(ResponseBody):
    index: int = Field(ge=0)
    object: Literal["score"]
    score: float


class ScoreResponse(ResponseBody):
    """One score for each pair, in the request's order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PoolingUsage
