"""pydantic-ai: python pydantic_ai_client.py BASE_URL MODEL"""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE_URL, MODEL = sys.argv[1:]
PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key="unused")
GREEDY = {"temperature": 0, "max_tokens": 100}


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    tame: bool


async def main() -> None:
    model = OpenAIChatModel(MODEL, provider=PROVIDER)
    agent = Agent(model, instructions="Be brief.", model_settings={**GREEDY, "max_tokens": 20})
    answer = await agent.run("Tell me about the sea in one sentence.")
    assert len(answer.output) > 10
    assert answer.usage.output_tokens > 0
    print("chat")

    async with agent.run_stream("Tell me about the sea in one sentence.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == answer.output
    print("stream")

    for output in (ToolOutput(Animal), NativeOutput(Animal)):
        typed = Agent(model, output_type=output, model_settings=GREEDY, retries=0)
        animal = (await typed.run("Describe a cat.")).output
        assert isinstance(animal, Animal), animal
        print(type(output).__name__)

    async with Agent(model, output_type=ToolOutput(Animal), model_settings=GREEDY).run_stream(
        "Describe a dog."
    ) as stream:
        assert isinstance(await stream.get_output(), Animal)
    print("tool output, streamed")

    status = 200
    try:
        await Agent(OpenAIChatModel("nobody", provider=PROVIDER)).run("hi")
    except ModelHTTPError as error:
        status = error.status_code
    assert status == 404
    print("errors")


asyncio.run(main())
