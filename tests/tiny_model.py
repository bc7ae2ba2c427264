"""A model so small that a CPU generates thousands of tokens a second. Its words mean nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from server.demo_model import ensure_demo_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def make_tiny_model(folder: Path) -> Path:
    """A two-layer Llama with seeded random weights and the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    demo = ensure_demo_model()
    for name in _TOKENIZER_FILES:
        if (demo / name).exists():
            shutil.copy(demo / name, folder / name)
    for template in demo.glob("chat_template*"):
        shutil.copy(template, folder / template.name)
    return folder
