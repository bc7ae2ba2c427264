"""The dimensions of a model, as far as time and memory depend on them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the dense FFN.

    num_per_token: routed experts that compute each token.
    size: intermediate size of one routed expert. shared_size: of all shared ones together.
    num_dense_layers: layers that keep a dense FFN of `ModelSpec.ffn_size`.
    """

    num: int
    num_per_token: int
    size: int
    shared_size: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """DeepSeek's attention (MLA): the cache holds one latent vector per token, whatever the heads.

    q_rank: rank of the query's down projection, None where queries are projected directly.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. All layers are taken as equal: where they differ (sliding windows
    in some, experts in some), each counts as their mean.

    head_dim: of query, key and value; num_heads · head_dim need not be hidden_size (Qwen3-32B).
    ffn_size: intermediate size of the dense FFN. is_ffn_gated: three matrices (SwiGLU) or two.
    sliding_window: tokens that `num_sliding_layers` layers attend to at most.
    weight_bytes, kv_bytes: per element of the layers' matrices and of the KV cache.
    activation_bytes: per element of activations, embedding and LM head.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context: int = 131072
    is_ffn_gated: bool = True
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    num_sliding_layers: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    weight_bytes: float = 2.0
    activation_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def query_size(self) -> int:
        """Width of all query heads together; of what attention puts out, for all but MLA."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (H_kv)."""
        return self.num_kv_heads * self.head_dim

    def allows_tp(self, tp: int) -> bool:
        """Whether vLLM can split this model over `tp` GPUs: heads and FFN must divide, and KV heads
        divide `tp` or are divided by it (they are replicated then)."""
        kv_fits = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        sizes = [self.ffn_size] if self.experts is None else [self.experts.size]
        if self.experts is not None and self.experts.shared_size:
            sizes.append(self.experts.shared_size)
        return self.num_heads % tp == 0 and kv_fits and all(size % tp == 0 for size in sizes)

    def attention_weights(self, tp: int = 1) -> float:
        """Elements of one layer's attention matrices, on one of `tp` GPUs."""
        hidden = self.hidden_size
        if self.latent is not None:
            latent, heads = self.latent, self.num_heads
            head_out = heads * (latent.nope_dim + latent.rope_dim)
            query = (
                hidden * head_out / tp
                if latent.q_rank is None
                else hidden * latent.q_rank + latent.q_rank * head_out / tp
            )
            down = hidden * (latent.kv_rank + latent.rope_dim)
            up = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim) / tp
            return query + down + up + heads * latent.value_dim * hidden / tp
        kv_heads = math.ceil(self.num_kv_heads / tp)
        return hidden * (2 * self.query_size / tp + 2 * kv_heads * self.head_dim)

    def ffn_weights(self, tp: int = 1) -> float:
        """Elements of one layer's FFN matrices (all experts, the router), on one of `tp` GPUs."""
        matrices = 3 if self.is_ffn_gated else 2
        dense = matrices * self.hidden_size * self.ffn_size / tp
        if self.experts is None:
            return dense
        experts = self.experts
        one = matrices * self.hidden_size
        sparse = (
            one * (experts.num * experts.size + experts.shared_size) / tp
            + self.hidden_size * experts.num
        )
        share = experts.num_dense_layers / self.num_layers
        return share * dense + (1 - share) * sparse

    def layer_weight_bytes(self, tp: int = 1) -> float:
        """Weights of one layer on one of `tp` GPUs, in bytes."""
        return (self.attention_weights(tp) + self.ffn_weights(tp)) * self.weight_bytes

    def vocabulary_bytes(self, tp: int = 1) -> float:
        """The embedding, or the LM head, on one of `tp` GPUs, in bytes (vLLM pads to 64 rows)."""
        rows = math.ceil(math.ceil(self.vocab_size / 64) * 64 / tp)
        return rows * self.hidden_size * self.activation_bytes

    def weight_bytes_total(self) -> float:
        """All weights, in bytes."""
        ends = self.vocabulary_bytes() * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_weight_bytes() + ends

    def kv_bytes_per_token(self, tp: int = 1) -> float:
        """KV cache of one token in one layer, on one of `tp` GPUs, in bytes (2 · H_kv · E)."""
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * self.kv_bytes
        return 2 * math.ceil(self.num_kv_heads / tp) * self.head_dim * self.kv_bytes

    def cached_tokens(self, num_tokens: float) -> float:
        """Tokens of a sequence of `num_tokens` that a layer keeps, as the mean over the layers."""
        if self.sliding_window is None:
            return num_tokens
        share = self.num_sliding_layers / self.num_layers
        return (1 - share) * num_tokens + share * min(num_tokens, self.sliding_window)
