"""`vllm bench serve`: python vllm_bench.py BASE_URL MODEL TOKENIZER_FOLDER

Runs in the server's own environment. The command itself cannot be used with CPU builds, whose
package bears another name than the one it looks up.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main

BASE_URL, MODEL, TOKENIZER = sys.argv[1:]
NUM_PROMPTS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS = 6, 32, 8


def bench(backend: str, endpoint: str, model: str, *options: str) -> dict[str, float]:
    """The result of one short run."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        where = ["--base-url", BASE_URL.removesuffix("/v1"), "--endpoint", endpoint]
        what = ["--backend", backend, "--model", model, "--tokenizer", TOKENIZER]
        load = ["--dataset-name", "random", "--num-prompts", str(NUM_PROMPTS)]
        sizes = ["--random-input-len", str(NUM_INPUT_TOKENS)]
        sizes += ["--random-output-len", str(NUM_OUTPUT_TOKENS)]
        result = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        main(parser.parse_args([*where, *what, *load, *sizes, *result, *options, "--disable-tqdm"]))
        return dict(json.loads((Path(folder) / "result.json").read_text()))


for backend, endpoint in (
    ("openai", "/v1/completions"),
    ("openai-chat", "/v1/chat/completions"),
):
    measured = bench(backend, endpoint, MODEL, "--ignore-eos")
    assert measured["completed"] == NUM_PROMPTS, measured
    assert measured["failed"] == 0, measured
    assert measured["total_output_tokens"] == NUM_PROMPTS * NUM_OUTPUT_TOKENS, measured
    assert measured["mean_ttft_ms"] > 0
    assert measured["mean_itl_ms"] > 0
    print(backend, "passed")

measured = bench("openai-embeddings", "/v1/embeddings", "all-MiniLM-L6-v2")
assert measured["completed"] == NUM_PROMPTS, measured
print("openai-embeddings passed")
