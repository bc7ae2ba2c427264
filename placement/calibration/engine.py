"""Times passes of the engine itself over a small model with random weights, on a CPU.

What eager layers cost between their kernels no kernel shows: on a CPU it is half of a small model's
step. Two depths tell layers from what a pass costs besides. vLLM must be installed; GPUs replay
graphs, so that there the kernels tell enough.

    python -m placement.calibration.engine LAYERS
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from placement.calibration.samples import EnginePass
from placement.calibration.stopwatch import typical_s
from placement.model import ModelSpec

DEPTHS = (2, 8)
_CASES = ((1, 128), (1, 512), (4, 256), (1, 1024), (8, 128), (32, 64))
_NUM_ROUNDS = 3
_OUTPUT_TOKENS = 12
_ROUND_PASSES = len(_CASES) * _OUTPUT_TOKENS
_TIMEOUT_S = 180.0
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def engine_model(layers: int) -> ModelSpec:
    """The dimensions of the model that is timed."""
    return ModelSpec(
        name="calibration",
        num_layers=layers,
        hidden_size=512,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=1536,
        vocab_size=4096,
        max_context=2048,
    )


def is_engine_there() -> bool:
    return util.find_spec("vllm") is not None


def measure_engine(layers: int, num_threads: int | None) -> list[EnginePass]:
    """Passes over a model of so many layers; none if the engine does not start in time."""
    environment = {**os.environ, **_ENVIRONMENT}
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "passes.jsonl"
        environment |= {"PYTHONPATH": search, "SHUNTYARD_PASS_TIMES": str(notes)}
        command = [sys.executable, "-m", "placement.calibration.engine", str(layers), folder]
        try:
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=True,
            )
            lines = notes.read_text("utf-8").splitlines()
        except (OSError, subprocess.SubprocessError):
            return []
    return list(_passes(layers, map(json.loads, lines)))


def passes_of(notes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[int], float]]:
    """New tokens of each request and seconds of each pass, by the notes of one stage.

    A pass is `execute_model`, and `sample_tokens` after it.
    """
    tokens: list[int] | None = None
    seconds = 0.0
    for note in notes:
        if note["what"] == "execute":
            if tokens is not None:
                yield tokens, seconds
            tokens, seconds = note["tokens"], note["wall_s"] - note["waited_s"]
        elif note["what"] == "sample":
            seconds += note["wall_s"] - note["waited_s"]
        elif tokens is not None:
            yield tokens, seconds
            tokens = None
    if tokens is not None:
        yield tokens, seconds


def _passes(layers: int, notes: Iterable[Mapping[str, Any]]) -> Iterator[EnginePass]:
    """The typical prefill and decode step of each case over all rounds but the first."""
    found = list(passes_of(notes))
    rounds = [
        found[start : start + _ROUND_PASSES] for start in range(0, len(found), _ROUND_PASSES)
    ][1:]
    for index, (batch, tokens) in enumerate(_CASES):
        own = [one[index * _OUTPUT_TOKENS : (index + 1) * _OUTPUT_TOKENS] for one in rounds]
        prefills = [seconds for one in own for new, seconds in one if new == [tokens] * batch]
        steps = [seconds for one in own for new, seconds in one if new == [1] * batch]
        for is_prefill, cached, times in (
            (True, tokens, prefills),
            (False, tokens + _OUTPUT_TOKENS // 2, steps),
        ):
            if times:
                yield EnginePass(
                    layers=layers,
                    is_prefill=is_prefill,
                    batch=batch,
                    tokens=cached,
                    seconds=typical_s(times),
                )


class TimedEngine:
    """vLLM on a CPU, eager, with workers that note their passes in $SHUNTYARD_PASS_TIMES.

    options: vLLM's, of the model and of how it is cut.
    """

    def __init__(self, model: str, *, max_num_batched_tokens: int, **options: Any) -> None:
        from vllm import LLM

        self._engine = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=32,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
            distributed_executor_backend="mp",
            worker_cls="placement.calibration.timed_worker.TimedCPUWorker",
            **options,
        )

    def generate(
        self, batch: int, prompt_tokens: int, output_tokens: int, token: Callable[[], int]
    ) -> None:
        """A batch of so many prompts, all there at once, each with all its output. token: of a
        prompt, one after another."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [
            {"prompt_token_ids": [token() for _ in range(prompt_tokens)]} for _ in range(batch)
        ]
        self._engine.generate(prompts, sampling, use_tqdm=False)


def _serve(layers: int, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(_config(engine_model(layers))))
    engine = TimedEngine(
        str(folder), max_num_batched_tokens=2048, load_format="dummy", skip_tokenizer_init=True
    )
    numbers = random.Random(0)
    for batch, tokens in _NUM_ROUNDS * _CASES:
        engine.generate(batch, tokens, _OUTPUT_TOKENS, lambda: numbers.randrange(4096))


def _config(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # vLLM's own end on a CPU takes long
