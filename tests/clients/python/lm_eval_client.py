"""lm-eval's local-completions and local-chat-completions:
python lm_eval_client.py BASE_URL MODEL TOKENIZER_FOLDER

Likelihoods come from echo with logprobs. They are compared with sums that this script makes itself
from single requests, so a shift of one token between text and logprobs would show.
"""

import json
import math
import sys
import urllib.request
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

BASE_URL, MODEL, TOKENIZER = sys.argv[1:]

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a large green frog"),
    ("One two three", " four five six"),
    ("Water boils at", " one hundred degrees."),
    ("Die Straße ist", " naß und glänzt 🚂"),
]


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        BASE_URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response))


def own_sum(context: str, continuation: str) -> float:
    """The log-likelihood of the continuation, from an echo of the whole text."""
    encoded = [
        model.tok_encode(text, add_special_tokens=False)
        for text in (context, context + continuation)
    ]
    answer = post(
        "/completions",
        {"model": MODEL, "prompt": encoded[1], "echo": True, "logprobs": 0, "max_tokens": 0},
    )
    return math.fsum(answer["choices"][0]["logprobs"]["token_logprobs"][len(encoded[0]) :])


model = LocalCompletionsAPI(
    base_url=f"{BASE_URL}/completions",
    pretrained=MODEL,
    model=MODEL,
    tokenizer=TOKENIZER,
    tokenizer_backend="huggingface",
    tokenized_requests=True,
    max_length=2048,
    num_concurrent=1,
    max_retries=1,
)
requests = [
    Instance("loglikelihood", {}, pair, number, metadata=("check", number, 1))
    for number, pair in enumerate(PAIRS)
]
results = model.loglikelihood(requests, disable_tqdm=True)
assert len(results) == len(PAIRS)
for (context, continuation), (score, is_greedy) in zip(PAIRS, results, strict=True):
    expected = own_sum(context, continuation)
    assert math.isfinite(score)
    assert score < 0
    # In bfloat16 two runs of one prompt in different batches agree to a few hundredths a token.
    assert abs(score - expected) <= 0.05 + 0.02 * abs(expected), (continuation, score, expected)
    assert isinstance(is_greedy, bool)
paris, frog = results[0], results[1]
assert paris[1], "the most likely continuation is greedy"
assert not frog[1]
assert paris[0] > frog[0]
print("loglikelihood")

rolling = model.loglikelihood_rolling(
    [Instance("loglikelihood_rolling", {}, ("The sea is wide and blue.",), 0)], disable_tqdm=True
)
assert math.isfinite(rolling[0])
print("loglikelihood_rolling")

generation = {"until": ["\n"], "max_gen_toks": 16, "temperature": 0}
texts = model.generate_until(
    [Instance("generate_until", {}, ("The capital of France is", generation), 0)],
    disable_tqdm=True,
)
assert "Paris" in texts[0]
assert "\n" not in texts[0]
print("generate_until")

chat = LocalChatCompletion(
    base_url=f"{BASE_URL}/chat/completions",
    pretrained=MODEL,
    model=MODEL,
    tokenizer_backend=None,
    num_concurrent=1,
    max_retries=1,
)
history = chat.apply_chat_template([{"role": "user", "content": "Tell me about the sea."}])
texts = chat.generate_until(
    [Instance("generate_until", {}, (history, generation), 0)], disable_tqdm=True
)
assert len(texts[0]) > 5
print("local-chat-completions")
