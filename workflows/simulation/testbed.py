"""The machines of a simulation. The preset is the paper's: four RTX 4090."""

from __future__ import annotations

from dataclasses import dataclass, field

from workflows.scheduling.costs import Cost
from workflows.simulation.llm_pipeline import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Resources and what they cost. The paper gives the counts; sizes and times are ours.

    llm_seats: generations at once on a pipeline; 24 of 1,500 tokens fill the KV space of 24 GB
    beside Llama-3-8B. embed, rerank: one call to an instance; three of each share two GPUs
    (bge-large, 110-token chunks: about 1.5 ms of a GPU each, and 15 ms for the call).
    ingest, search: Postgres. web_median_s, web_sigma: latency of the search API, lognormal.
    noise: relative deviation of calls' times. subnode_tokens: tokens between two reports.
    """

    __test__ = False

    num_llm: int = 2
    llm_seats: int = 24
    llm: StepCosts = field(default_factory=StepCosts)
    subnode_tokens: int = 32
    num_embed: int = 3
    num_rerank: int = 3
    max_batch: int = 32
    embed: Cost = field(default_factory=lambda: Cost(overhead_s=0.015, per_output_s=0.0045))
    rerank: Cost = field(default_factory=lambda: Cost(overhead_s=0.015, per_output_s=0.0055))
    num_database: int = 16
    ingest: Cost = field(default_factory=lambda: Cost(overhead_s=0.004, per_output_s=0.0003))
    search: Cost = field(default_factory=lambda: Cost(overhead_s=0.012))
    num_web: int = 32
    web_median_s: float = 0.7
    web_sigma: float = 0.5
    noise: float = 0.1

    @property
    def slots(self) -> dict[str, int]:
        return {
            "llm": self.num_llm * self.llm_seats,
            "embed": self.num_embed,
            "rerank": self.num_rerank,
            "database": self.num_database,
            "web": self.num_web,
        }

    @property
    def batches(self) -> dict[str, int]:
        """Items in one call."""
        return {
            "llm": 1,
            "embed": self.max_batch,
            "rerank": self.max_batch,
            "database": 64,
            "web": 1,
        }

    def costs(self) -> dict[str, Cost]:
        """By profile, as the scheduler would have learnt them at half of the load."""
        step_s = self.llm.base_s + self.llm_seats / 2 * self.llm.per_sequence_s
        llm = Cost(
            overhead_s=0.02,
            per_output_s=1.5 * step_s,
            per_input_s=2 * self.llm.per_prompt_token_s,
        )
        web = Cost(overhead_s=self.web_median_s)
        return {
            "llm": llm,
            "rewrite": llm,
            "embed": self.embed,
            "rerank": self.rerank,
            "ingest": self.ingest,
            "search": self.search,
            "web": web,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Machines and the documents that are put to them."""

    __test__ = False

    testbed: Testbed
    median_chunks: float
    about: str


PRESETS: dict[str, Preset] = {
    "testbed": Preset(
        testbed=Testbed(), median_chunks=24.0, about="the paper's machines; the LLM is the limit"
    ),
    "documents": Preset(
        testbed=Testbed(),
        median_chunks=120.0,
        about="the same machines, documents five times as long; embedding is the limit",
    ),
}
