"""The real pooling host around a model that knows only the lengths of words.

`mode` in the options says how it behaves; see below.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from spot.engines.codec import Dead, PoolingCard
from spot.engines.gateway_link import GatewayLink, connect
from spot.engines.pooling_host import PoolingHost


class FakeSample:
    """The lengths of a text's words stand for its tokens."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.num_tokens = len(words)


class FakeModel:
    """A vector holds a text's number of tokens, and how many inputs its pass had.

    Of the words, `crash` ends the process (`crash-once` only where the marker file does not exist),
    `bad` fails the pass, `nan` spoils the result, `slow` takes a while.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.card = PoolingCard(
            options.get("task", "embed"),
            dimension=1 if options.get("task") == "score" else 3,
            max_model_len=8,
            vocab_size=100,
            matryoshka=True,
        )
        self._marker = Path(options.get("marker", "/nonexistent"))

    def tokenize(self, texts: Any, *, truncate_to: int | None = None) -> Any:
        samples = []
        for text in texts:
            words = (" ".join(text) if isinstance(text, tuple) else text).split()
            if "untokenizable" in words:
                raise ValueError("no")
            samples.append(FakeSample(words if truncate_to is None else words[:truncate_to]))
        return samples

    def sample_of_ids(self, token_ids: list[int], *, truncate_to: int | None = None) -> Any:
        return FakeSample([str(token_id) for token_id in token_ids])

    def pool(self, samples: Any) -> Any:
        rows = [[len(sample.words), 1.0, len(samples)] for sample in samples]
        for sample, row in zip(samples, rows, strict=True):
            for word in sample.words:
                self._obey(word, row)
        return np.asarray(rows, "<f4")[:, : self.card.dimension]

    def _obey(self, word: str, row: list[float]) -> None:
        match word:
            case "crash":
                os._exit(3)
            case "crash-once" if not self._marker.exists():
                self._marker.touch()
                os._exit(3)
            case "bad":
                raise RuntimeError("out of memory")
            case "device-lost":
                raise RuntimeError("CUDA error: device-side assert triggered")
            case "nan":
                row[0] = float("nan")
            case "slow":
                time.sleep(0.05)
            case "stuck":
                time.sleep(60)


def main() -> None:
    link, options = connect("fake_pooling_host")
    if options.get("mode") == "fatal":
        link.say(Dead("OSError: no such model", fatal=True))
        sys.exit(1)
    anyio.run(serve, link, FakeModel(options), options)


async def serve(link: GatewayLink, model: FakeModel, options: dict[str, Any]) -> None:
    async with link.opened():
        await PoolingHost(
            model,
            link,
            max_batch=options.get("max_batch", 4),
            max_batch_tokens=options.get("max_batch_tokens", 100),
        ).run()


if __name__ == "__main__":
    main()
