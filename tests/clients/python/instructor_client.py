"""instructor, in modes that suit self-hosted models: python instructor_client.py BASE_URL MODEL"""

import json
import sys
from typing import Any, Literal

import instructor
from instructor.core.exceptions import InstructorError
from openai import OpenAI
from pydantic import BaseModel

BASE_URL, MODEL = sys.argv[1:]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 100}


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]
    tame: bool


def in_mode(mode: instructor.Mode) -> instructor.Instructor:
    client = OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0, timeout=120)
    return instructor.from_openai(client, mode=mode)


def ask(client: instructor.Instructor, **fields: Any) -> Animal:
    return client.chat.completions.create(
        response_model=Animal,
        messages=[{"role": "user", "content": "Describe a cat."}],
        max_retries=0,
        **GREEDY,
        **fields,
    )


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    answer = ask(in_mode(mode))
    assert isinstance(answer, Animal), answer
    print(mode.name, answer, flush=True)

# Mode JSON leaves the keys to the model, which with 135M parameters cannot be relied upon: what
# is promised is JSON.
client = in_mode(instructor.Mode.JSON)
responses: list[Any] = []
client.on("completion:response", responses.append)
try:
    ask(client)
except (InstructorError, ValueError):
    assert responses, "refused"
choice = responses[0].choices[0]
assert choice.message.content.lstrip().startswith("{"), choice
if choice.finish_reason == "stop":
    json.loads(choice.message.content)
print("JSON", choice.finish_reason, flush=True)

# The same with the schema enforced.
constraint = {"structured_outputs": {"json": Animal.model_json_schema()}}
answer = ask(in_mode(instructor.Mode.MD_JSON), extra_body=constraint)
assert isinstance(answer, Animal), answer
print("MD_JSON", answer, flush=True)

partials = list(
    in_mode(instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Animal,
        messages=[{"role": "user", "content": "Describe a dog."}],
        **GREEDY,
    )
)
assert len(partials) > 1
assert partials[-1].kind in ("cat", "dog")
print("TOOLS, streamed", partials[-1])
