"""LiteLLM's provider hosted_vllm: python litellm_client.py BASE_URL MODEL"""

import json
import sys

import litellm

BASE_URL, MODEL = sys.argv[1:]
WHERE = {"api_base": BASE_URL, "api_key": "unused", "num_retries": 0}
CHAT = {
    "model": f"hosted_vllm/{MODEL}",
    "messages": [{"role": "user", "content": "Tell me about the sea in one sentence."}],
    "temperature": 0,
    **WHERE,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
        },
    },
}

answer = litellm.completion(**CHAT, max_tokens=20)
text = answer.choices[0].message.content
assert len(text) > 10
assert answer.usage.completion_tokens > 0
print("chat")

chunks = list(
    litellm.completion(**CHAT, max_tokens=20, stream=True, stream_options={"include_usage": True})
)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
rebuilt = litellm.stream_chunk_builder(chunks)
assert rebuilt.choices[0].finish_reason == answer.choices[0].finish_reason
assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens
print("stream")

called = litellm.completion(**CHAT, max_tokens=100, tools=[TOOL], tool_choice="required")
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "get_weather"
assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
streamed = litellm.stream_chunk_builder(
    list(
        litellm.completion(
            **CHAT, max_tokens=100, tools=[TOOL], tool_choice="required", stream=True
        )
    )
)
assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
print("tools")

embedding = litellm.embedding(model="hosted_vllm/all-MiniLM-L6-v2", input=["sea"], **WHERE)
assert len(embedding.data[0]["embedding"]) == 384
print("embeddings")

for fields, kind in (
    ({"temperature": 9}, litellm.BadRequestError),
    ({"model": "hosted_vllm/nobody"}, litellm.NotFoundError),
):
    message = ""
    try:
        litellm.completion(**{**CHAT, **fields})
    except kind as error:
        message = str(error)
    assert "temperature" in message or "nobody" in message, f"{fields}: {message}"
print("errors")
