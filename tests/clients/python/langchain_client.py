"""langchain-openai: python langchain_client.py BASE_URL MODEL"""

import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

BASE_URL, MODEL = sys.argv[1:]
COMMON = {"base_url": BASE_URL, "api_key": "unused", "max_retries": 0, "temperature": 0}


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    tame: bool


chat = ChatOpenAI(model=MODEL, max_tokens=20, **COMMON)
messages = [SystemMessage("Be brief."), HumanMessage("Tell me about the sea in one sentence.")]

answer = chat.invoke(messages)
assert len(answer.content) > 10
assert answer.usage_metadata["output_tokens"] > 0
assert answer.response_metadata["finish_reason"] in ("stop", "length")
print("chat")

pieces = list(chat.stream(messages, stream_usage=True))
whole = pieces[0]
for piece in pieces[1:]:
    whole = whole + piece
assert len(pieces) > 2
assert whole.content == answer.content
assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
print("stream")

forced = ChatOpenAI(model=MODEL, max_tokens=100, **COMMON).bind_tools(
    [get_weather], tool_choice="required", parallel_tool_calls=False
)
called = forced.invoke("What is the weather in Paris?")
(call,) = called.tool_calls
assert call["name"] == "get_weather"
assert call["args"]["city"] in ("Paris", "Oslo")
assert not called.invalid_tool_calls
pieces = list(forced.stream("What is the weather in Paris?"))
whole = pieces[0]
for piece in pieces[1:]:
    whole = whole + piece
assert [c["args"] for c in whole.tool_calls] == [call["args"]]
history = [HumanMessage("Weather?"), called, ToolMessage("sunny", tool_call_id=call["id"])]
assert chat.invoke(history).content
print("tools")

for method in ("json_schema", "function_calling"):
    model = ChatOpenAI(model=MODEL, max_tokens=80, **COMMON)
    animal = model.with_structured_output(Animal, method=method).invoke("Describe a cat.")
    assert isinstance(animal, Animal), animal
print("structured output")

completion = OpenAI(model=MODEL, max_tokens=4, **COMMON).invoke("The capital of France is")
assert "Paris" in completion
print("completions")

embedder = OpenAIEmbeddings(
    model="all-MiniLM-L6-v2",
    base_url=BASE_URL,
    api_key="unused",
    check_embedding_ctx_length=False,
)
cat, kitten, shares = embedder.embed_documents(["a cat", "a kitten", "the price of shares"])


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


assert len(cat) == 384
assert dot(cat, kitten) > dot(cat, shares) + 0.1
print("embeddings")

code = None
try:
    ChatOpenAI(model="nobody", **COMMON).invoke("hi")
except openai.NotFoundError as error:
    code = error.code
assert code == "model_not_found"
print("errors")
