"""Ingests batch after batch until it is killed: `python ingest_forever.py FOLDER`.

Says the number of each batch once it is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import numpy as np

from workflows.stores.collections import CollectionStore, NewDocument, VectorSpace
from workflows.stores.database import Database

DOCUMENTS_IN_BATCH = 50
CHUNKS_IN_DOCUMENT = 3
SPACE = VectorSpace(embedder="tiny", revision="1", dimension=8)


def batch(number: int) -> list[NewDocument]:
    rng = np.random.default_rng(number)
    return [
        NewDocument(
            id=f"{number}-{place}",
            content_hash=b"%d" % number,
            metadata={"batch": number},
            chunks=[f"chunk {index}" for index in range(CHUNKS_IN_DOCUMENT)],
            vectors=rng.normal(size=(CHUNKS_IN_DOCUMENT, 8)).astype(np.float32),
        )
        for place in range(DOCUMENTS_IN_BATCH)
    ]


async def main(folder: Path) -> None:
    async with Database(folder=folder) as database:
        store = CollectionStore(database)
        number = (await store.ingest("t", "c", SPACE, [])).epoch
        while True:
            await store.ingest("t", "c", SPACE, batch(number))
            print(number, flush=True)
            number += 1


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
