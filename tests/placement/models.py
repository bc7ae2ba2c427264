"""Models of known size, for tests by hand."""

from placement.model import ModelSpec

LLAMA_8B = ModelSpec(
    name="8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    vocab_size=128256,
)
LLAMA_70B = ModelSpec(
    name="70b",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=28672,
    vocab_size=128256,
)
