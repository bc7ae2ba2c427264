"""Times operations with torch on one device: products, attention, the smallest launch.

Weights and caches rotate through buffers larger than any cache of the device, since an engine's
layers push each other out. On a CPU, weights are packed as vLLM's CPU build packs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from placement.calibration.samples import Attention, Launch, Matmul, Sample
from placement.calibration.stopwatch import Operation, Stopwatch, cpu_stopwatch, cuda_stopwatch

Say = Callable[[str], None]
_Shapes = tuple[tuple[int, int, int, int], ...]

# (n, k): the widths of small and large models, and of their shares under tensor parallelism.
_GPU_WIDTHS: tuple[tuple[int, int], ...] = (
    (1280, 8192), (4096, 4096), (6144, 4096), (8192, 1024), (8192, 8192), (7168, 8192),
    (28672, 4096), (4096, 14336),
)  # fmt: skip
_GPU_ROWS: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CPU_WIDTHS: tuple[tuple[int, int], ...] = (
    (768, 768),
    (2048, 512),
    (768, 2048),
    (4096, 1024),
    (1024, 4096),
    (32000, 512),
)
_CPU_ROWS: tuple[int, ...] = (1, 2, 8, 32, 128, 512)
# (batch, tokens, heads, KV heads) with heads of 128 (GPU) or 64 (CPU).
_GPU_PREFILLS: _Shapes = (
    (1, 128, 32, 8), (1, 512, 32, 8), (1, 2048, 32, 8), (4, 512, 32, 8), (16, 128, 32, 8),
    (1, 4096, 32, 8), (1, 1024, 8, 1), (4, 1024, 64, 8), (1, 1024, 32, 32), (8, 256, 16, 16),
)  # fmt: skip
_GPU_DECODES: _Shapes = (
    (1, 512, 32, 8), (1, 4096, 32, 8), (8, 512, 32, 8), (8, 2048, 32, 8), (32, 512, 32, 8),
    (32, 2048, 32, 8), (64, 1024, 32, 8), (128, 512, 8, 1), (128, 1024, 32, 8), (32, 1024, 32, 32),
)  # fmt: skip
_CPU_PREFILLS: _Shapes = (
    (1, 128, 8, 4),
    (1, 512, 8, 4),
    (4, 256, 8, 4),
    (1, 1024, 8, 4),
    (1, 512, 16, 2),
)
_CPU_DECODES: _Shapes = (
    (1, 512, 8, 4),
    (4, 512, 8, 4),
    (16, 256, 8, 4),
    (32, 1024, 8, 4),
    (8, 1024, 16, 2),
)
_ROTATION_BYTES = {"cuda": 512 * 2**20, "cpu": 192 * 2**20}
_MOST_BUFFERS = 64
_CPU_FLOP_LIMIT = 8e9


def measure(device: str, say: Say) -> Iterator[Sample]:
    """All samples of a device (`cuda:0`, `cpu`), as they come. say: called with what comes next."""
    import torch

    kind = device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.set_device(device)
        bench = _Bench(torch, device, kind, cuda_stopwatch(torch))
        widths, rows = _GPU_WIDTHS, _GPU_ROWS
        prefills, decodes, size = _GPU_PREFILLS, _GPU_DECODES, 128
    else:
        bench = _Bench(torch, device, kind, cpu_stopwatch)
        widths, rows = _CPU_WIDTHS, _CPU_ROWS
        prefills, decodes, size = _CPU_PREFILLS, _CPU_DECODES, 64
    with torch.inference_mode():
        say("the smallest launch")
        yield bench.launch()
        for n, k in widths:
            say(f"products with {n} × {k}")
            yield from bench.matmuls(n, k, rows)
        say("attention of prompts")
        for shape in prefills:
            yield bench.attention(True, *shape, size)
        say("attention of single tokens")
        for shape in decodes:
            yield bench.attention(False, *shape, size)


class _Bench:
    """The operations on one device."""

    def __init__(self, torch: Any, device: str, kind: str, stopwatch: Stopwatch) -> None:
        self._torch = torch
        self._device = device
        self._is_cpu = kind == "cpu"
        self._stopwatch = stopwatch
        self._rotation_bytes = _ROTATION_BYTES[kind]
        torch.manual_seed(0)

    def launch(self) -> Launch:
        tiny = self._random(8, 8)
        return Launch(seconds=self._stopwatch(lambda index: tiny + tiny))

    def matmuls(self, n: int, k: int, rows: tuple[int, ...]) -> Iterator[Matmul]:
        count = self._count(2 * n * k)
        weights = [self._random(n, k) for _ in range(count)]
        for m in rows:
            if self._is_cpu and 2.0 * m * n * k > _CPU_FLOP_LIMIT:
                continue
            seconds = self._stopwatch(self._product(self._random(m, k), weights))
            yield Matmul(m=m, n=n, k=k, seconds=seconds)

    def attention(
        self, is_prefill: bool, batch: int, tokens: int, heads: int, kv_heads: int, size: int
    ) -> Attention:
        attend = self._torch.nn.functional.scaled_dot_product_attention
        count = self._count(4 * batch * tokens * kv_heads * size)
        caches = [
            [self._random(batch, kv_heads, tokens, size) for _ in range(2)] for _ in range(count)
        ]
        query = self._random(batch, heads, tokens if is_prefill else 1, size)

        def operation(index: int) -> object:
            keys, values = caches[index % count]
            return attend(query, keys, values, is_causal=is_prefill, enable_gqa=heads != kv_heads)

        return Attention(
            is_prefill=is_prefill,
            batch=batch,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            seconds=self._stopwatch(operation),
        )

    def _product(self, rows: Any, weights: list[Any]) -> Operation:
        count = len(weights)
        if not self._is_cpu:
            linear = self._torch.nn.functional.linear
            return lambda index: linear(rows, weights[index % count])
        ops = self._torch.ops.mkldnn
        packed = [ops._reorder_linear_weight(weight, len(rows)) for weight in weights]
        return lambda index: ops._linear_pointwise(
            rows, packed[index % count], None, "none", [], ""
        )

    def _count(self, num_bytes: int) -> int:
        return max(2, min(_MOST_BUFFERS, self._rotation_bytes // num_bytes))

    def _random(self, *shape: int) -> Any:
        torch = self._torch
        return torch.randn(*shape, device=self._device, dtype=torch.bfloat16)
