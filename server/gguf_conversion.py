"""Writes a Llama model that comes as one GGUF file as a folder in Hugging Face's format.

Weights are dequantized to bfloat16. Run as `python -m server.gguf_conversion MODEL.gguf FOLDER`,
so that the memory it takes ends with it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_TENSOR_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONTROL_TOKEN: Final = int(gguf.TokenType.CONTROL)


class GgufModel:
    """The fields and tensors of one GGUF file of architecture `llama`."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        if self.field("general.architecture") != "llama":
            raise ValueError(f"{path} is not a Llama model")

    def field(self, name: str) -> Any:
        """The value of a field; a KeyError names a missing one."""
        return self._reader.fields[name].contents()

    def config(self) -> dict[str, Any]:
        """What goes into `config.json`."""
        hidden_size = self.field("llama.embedding_length")
        num_heads = self.field("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.field("llama.vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "head_dim": hidden_size // num_heads,
            "max_position_embeddings": self.field("llama.context_length"),
            # Stored as float32: 1e-05 comes back as 9.99e-06.
            "rms_norm_eps": float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.field("llama.rope.freq_base"),
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": not any(t.name == "output.weight" for t in self._reader.tensors),
            "use_cache": True,
            **self.special_token_ids(),
        }

    def special_token_ids(self) -> dict[str, int]:
        return {
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Every tensor in bfloat16, under the name and in the layout that Transformers expects."""
        num_heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        weights = {}
        for tensor in self._reader.tensors:
            block, kind = _split_name(tensor.name)
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if kind in num_heads:
                values = _halves_from_pairs(values, num_heads[kind])
            name = f"{block}{_TENSOR_NAMES[kind]}.weight"
            weights[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        return weights

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer, with its control tokens as special tokens."""
        if self.field("tokenizer.ggml.pre") != "smollm":
            raise ValueError(f"unknown pre-tokenizer {self.field('tokenizer.ggml.pre')!r}")
        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.field("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True)
                for token, kind in zip(tokens, types, strict=True)
                if kind == _CONTROL_TOKEN
            ]
        )
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """What goes into `tokenizer_config.json`."""
        tokens = self.field("tokenizer.ggml.tokens")
        ids = self.special_token_ids()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[self.field("tokenizer.ggml.unknown_token_id")],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.field("llama.context_length"),
        }


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` to `folder`, which must exist."""
    model = GgufModel(source)
    _write_json(folder / "config.json", model.config())
    _write_json(folder / "generation_config.json", model.special_token_ids())
    _write_json(folder / "tokenizer_config.json", model.tokenizer_config())
    (folder / "chat_template.jinja").write_text(model.field("tokenizer.chat_template"))
    model.tokenizer().save(str(folder / "tokenizer.json"))
    save_file(model.weights(), folder / "model.safetensors", metadata={"format": "pt"})


def _split_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` is ("model.layers.3.", "attn_q"); `output.weight` ("", "output")."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.", match[2]
    return "", name.removesuffix(".weight")


def _halves_from_pairs(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of each head for rotary embedding.

    GGUF rotates neighbouring rows as a pair, Transformers row i with row i + head_dim / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
