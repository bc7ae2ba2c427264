"""The simulated engine's batcher plans, step by step, what vLLM's own scheduler plans."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from placement.simulator.batching import BatchedSequence, ContinuousBatcher, Step

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
TOKEN_ID = 7


@dataclass(frozen=True)
class Limits:
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Of a model that has no weights: the scheduler needs none."""
    folder: Path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="float32"
    )


def vllm_scheduler(model_config: ModelConfig, limits: Limits) -> Scheduler:
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            policy="priority",
            async_scheduling=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=limits.enable_prefix_caching
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    num_blocks = limits.num_blocks + 1  # One is the null block.
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


class Pair:
    """Both schedulers under the same load; each step is compared."""

    def __init__(self, model_config: ModelConfig, limits: Limits) -> None:
        self.vllm = vllm_scheduler(model_config, limits)
        self.ours = ContinuousBatcher(
            num_blocks=limits.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        init_none_hash(sha256)
        self._hasher = (
            get_request_block_hasher(BLOCK_SIZE, sha256) if limits.enable_prefix_caching else None
        )
        self._under_way: list[tuple[Any, Step]] = []
        self._ends: dict[BatchedSequence, int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way or self.ours.running or self.ours.num_waiting)

    def add(self, prompt: list[int], num_output: int, priority: int) -> None:
        name = str(len(self._ends))
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=num_output, ignore_eos=True),
            None,
            arrival_time=float(name),
            priority=priority,
            block_hasher=self._hasher,
        )
        self.vllm.add_request(request)
        sequence = self.ours.add(name, list(prompt), priority=priority)
        self._ends[sequence] = len(prompt) + num_output

    def plan(self) -> bool:
        """Plan a step on both sides. False if there is none to plan."""
        theirs = self.vllm.schedule()
        for _ in range(5):  # A plan that only preempts is an empty step there.
            if not theirs.num_scheduled_tokens:
                theirs = self.vllm.schedule()
        ours = self.ours.plan(now_s=0.0)
        taken = {} if ours is None else {s.id: num for s, num in ours.num_new_tokens.items()}
        assert list(taken.items()) == list(theirs.num_scheduled_tokens.items())
        num_used = self.vllm.kv_cache_manager.usage * self.ours.kv.num_blocks
        assert num_used == pytest.approx(self.ours.kv.num_used)
        if ours is not None:
            self._under_way.append((theirs, ours))
        return ours is not None

    def complete(self) -> None:
        """Complete the oldest step on both sides."""
        theirs, ours = self._under_way.pop(0)
        sampling = {sequence.id for sequence in ours.sampling}
        names = list(theirs.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN_ID] if name in sampling else [] for name in names],
        )
        self.vllm.update_from_output(theirs, output)
        for sequence in self.ours.complete(ours):
            if len(sequence.token_ids) + 1 == self._ends[sequence]:
                self.ours.finish(sequence)
            else:
                self.ours.append(sequence, TOKEN_ID)
        self.ours.check_invariants()

    def turn(self, depth: int) -> None:
        """One turn with up to `depth` steps under way."""
        if len(self._under_way) < depth and self.plan() and len(self._under_way) < depth:
            return
        if self._under_way:
            self.complete()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_both_plan_the_same_steps(
    model_config: ModelConfig, depth: int, enable_prefix_caching: bool
) -> None:
    num_preemptions = 0
    for seed in range(6):
        chance = random.Random(seed)
        limits = Limits(
            num_blocks=chance.randint(16, 36),
            max_num_seqs=chance.randint(2, 6),
            max_num_batched_tokens=chance.randint(8, 40),
            enable_prefix_caching=enable_prefix_caching,
        )
        pair = Pair(model_config, limits)
        num_left = 25
        while pair.is_busy or num_left:
            if num_left and chance.random() < 0.3:
                num_left -= 1
                num_prompt = chance.randint(1, 40)
                prompt = [5 if at < 8 else chance.randint(1, 2) for at in range(num_prompt)]
                pair.add(prompt, chance.randint(1, 60 - num_prompt), chance.choice([0, 0, 0, 1]))
            pair.turn(depth)
        assert not pair.vllm.has_unfinished_requests()
        num_preemptions += pair.ours.num_preemptions
    assert num_preemptions > 0
