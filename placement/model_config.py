"""From a Hugging Face config.json to a `ModelSpec`.

Exact for the dense families (matrices; norms and biases, below 0.1 % of the weights, are left out):
Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-2 and Phi-3/4. Of Gemma 3 the language model only.
Approximate for mixtures of experts (Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek V2 and V3): dense and
sparse layers count as their mean, routing as uniform, and DeepSeek's extra layers for multi-token
prediction are left out. Defaults of missing fields are those of transformers' configuration
classes, which is where a checkpoint's own loader takes them from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from placement.config_fields import ConfigFields
from placement.errors import InvalidInput, unknown_name
from placement.model import Experts, LatentAttention, ModelSpec
from placement.weight_format import element_bytes

_SLIDING_TYPES = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a `model_type` means beyond its fields.

    defaults: of missing fields. num_sliding: how many layers have a sliding window.
    experts, latent: how a mixture of experts and MLA are read, where there are any.
    """

    num_sliding: Callable[[ConfigFields, int], int]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_ffn_gated: bool = True
    experts: Callable[[ConfigFields, int], Experts] | None = None
    has_latent_attention: bool = False


def model_spec(
    config: Mapping[str, Any],
    *,
    name: str = "config.json",
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> ModelSpec:
    """The dimensions of the model that a config.json describes.

    name: of the model, in the spec and in errors. The other arguments are vLLM's flags.
    Raises InvalidInput that names the field, for a family that is not known as well.
    """
    text = _text_config(config)
    family = _family_of(text, config, name)
    fields = ConfigFields(text, family.defaults, name=name)
    num_layers = fields.count("num_hidden_layers")
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    latent = _latent(fields) if family.has_latent_attention else None
    num_sliding = family.num_sliding(fields, num_layers)
    sizes = element_bytes(
        {**text, **config}, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads if latent else _num_kv_heads(fields, num_heads),
        head_dim=latent.nope_dim + latent.rope_dim if latent else _head_dim(fields),
        ffn_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        max_context=fields.count("max_position_embeddings", 131072),
        is_ffn_gated=family.is_ffn_gated,
        tie_word_embeddings=_is_tied(config, fields),
        sliding_window=fields.count("sliding_window") if num_sliding else None,
        num_sliding_layers=num_sliding,
        experts=family.experts(fields, num_layers) if family.experts else None,
        latent=latent,
        weight_bytes=sizes.weight,
        activation_bytes=sizes.activation,
        kv_bytes=sizes.kv,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config, else all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _family_of(text: Mapping[str, Any], config: Mapping[str, Any], name: str) -> _Family:
    model_type = text.get("model_type") or config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInput(f"{name}: model_type", "is missing")
    family = _FAMILIES.get(model_type)
    if family is None:
        raise unknown_name(f"{name}: model_type", model_type, _FAMILIES)
    return family


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} must divide {num_heads} heads")
    return num_kv_heads


def _head_dim(fields: ConfigFields) -> int:
    """Its own field where there is one: it need not be hidden_size / heads (Qwen3, Gemma)."""
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if not fields.is_set("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is no multiple of {num_heads} heads")
    return fields.count("head_dim", hidden_size // num_heads)


def _is_tied(config: Mapping[str, Any], fields: ConfigFields) -> bool:
    """Multimodal configs say it outside or inside."""
    if isinstance(config.get("tie_word_embeddings"), bool):
        return bool(config["tie_word_embeddings"])
    return fields.flag("tie_word_embeddings")


def _no_sliding(fields: ConfigFields, num_layers: int) -> int:
    del fields, num_layers
    return 0


def _all_sliding(fields: ConfigFields, num_layers: int) -> int:
    """Mistral, Phi-3: every layer, where there is a window at all."""
    return num_layers if fields.is_set("sliding_window") else 0


def _listed_sliding(fields: ConfigFields, num_layers: int) -> int | None:
    """What `layer_types` says, where it is given."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, Sequence) or len(layer_types) != num_layers:
        raise fields.error("layer_types", f"must list a type for each of {num_layers} layers")
    return sum(one in _SLIDING_TYPES for one in layer_types)


def _qwen_sliding(fields: ConfigFields, num_layers: int) -> int:
    """Off unless `use_sliding_window`; then the layers from `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or not fields.is_set("sliding_window"):
        return 0
    listed = _listed_sliding(fields, num_layers)
    if listed is not None:
        return listed
    return max(0, num_layers - fields.count("max_window_layers", least=0))


def _qwen3_moe_sliding(fields: ConfigFields, num_layers: int) -> int:
    """Off unless `use_sliding_window`; then every layer."""
    return _all_sliding(fields, num_layers) if fields.flag("use_sliding_window") else 0


def _patterned_sliding(fields: ConfigFields, num_layers: int) -> int:
    """Gemma: all but every n-th layer (n = 2 in Gemma 2, `sliding_window_pattern` in Gemma 3)."""
    if not fields.is_set("sliding_window"):
        return 0
    listed = _listed_sliding(fields, num_layers)
    full = num_layers // fields.count("sliding_window_pattern")
    return num_layers - full if listed is None else listed


def _experts_per_token(fields: ConfigFields, num: int) -> int:
    per_token = fields.count("num_experts_per_tok")
    if per_token > num:
        raise fields.error("num_experts_per_tok", f"must be at most the {num} experts")
    return per_token


def _mixtral_experts(fields: ConfigFields, num_layers: int) -> Experts:
    del num_layers
    num = fields.count("num_local_experts")
    return Experts(
        num=num,
        num_per_token=_experts_per_token(fields, num),
        size=fields.count("intermediate_size"),
    )


def _qwen_experts(fields: ConfigFields, num_layers: int) -> Experts:
    """Every `decoder_sparse_step`-th layer is sparse, but for `mlp_only_layers`."""
    step, only_dense = fields.count("decoder_sparse_step"), fields.get("mlp_only_layers") or []
    if not isinstance(only_dense, list):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    num_sparse = sum(
        layer not in only_dense and (layer + 1) % step == 0 for layer in range(num_layers)
    )
    num = fields.count("num_experts")
    return Experts(
        num=num,
        num_per_token=_experts_per_token(fields, num),
        size=fields.count("moe_intermediate_size"),
        shared_size=fields.count("shared_expert_intermediate_size", 0, least=0),
        num_dense_layers=num_layers - num_sparse,
    )


def _deepseek_experts(fields: ConfigFields, num_layers: int) -> Experts:
    """Sparse from layer `first_k_dense_replace` on, in every `moe_layer_freq`-th layer."""
    first, step = fields.count("first_k_dense_replace", least=0), fields.count("moe_layer_freq", 1)
    num_sparse = sum(layer >= first and layer % step == 0 for layer in range(num_layers))
    size = fields.count("moe_intermediate_size")
    num = fields.count("n_routed_experts")
    return Experts(
        num=num,
        num_per_token=_experts_per_token(fields, num),
        size=size,
        shared_size=size * fields.count("n_shared_experts", 0, least=0),
        num_dense_layers=num_layers - num_sparse,
    )


def _latent(fields: ConfigFields) -> LatentAttention:
    return LatentAttention(
        q_rank=fields.count("q_lora_rank") if fields.is_set("q_lora_rank") else None,
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
    )


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "vocab_size": 256000,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA3 = _Family(
    num_sliding=_patterned_sliding,
    defaults={**_GEMMA, "vocab_size": 262208, "sliding_window_pattern": 6},
)
_DEEPSEEK_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_FAMILIES = {
    "llama": _Family(num_sliding=_no_sliding, defaults={"max_position_embeddings": 2048}),
    "mistral": _Family(
        num_sliding=_all_sliding, defaults={"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "qwen2": _Family(
        num_sliding=_qwen_sliding, defaults={**_QWEN_WINDOW, "num_key_value_heads": 32}
    ),
    "qwen3": _Family(
        num_sliding=_qwen_sliding,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": _Family(
        num_sliding=_no_sliding,
        defaults={**_GEMMA, "num_attention_heads": 16, "num_key_value_heads": 16},
    ),
    "gemma2": _Family(
        num_sliding=_patterned_sliding, defaults={**_GEMMA, "sliding_window_pattern": 2}
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": _Family(
        num_sliding=_no_sliding, defaults={"max_position_embeddings": 2048}, is_ffn_gated=False
    ),
    "phi3": _Family(num_sliding=_all_sliding, defaults={"max_position_embeddings": 4096}),
    "mixtral": _Family(
        num_sliding=_all_sliding,
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        experts=_mixtral_experts,
    ),
    "qwen2_moe": _Family(
        num_sliding=_no_sliding,
        defaults={
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
        },
        experts=_qwen_experts,
    ),
    "qwen3_moe": _Family(
        num_sliding=_qwen3_moe_sliding,
        defaults={
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "moe_intermediate_size": 768,
        },
        experts=_qwen_experts,
    ),
    "deepseek_v2": _Family(
        num_sliding=_no_sliding,
        defaults={**_DEEPSEEK_MLA, "first_k_dense_replace": 0, "n_shared_experts": 2},
        experts=_deepseek_experts,
        has_latent_attention=True,
    ),
    "deepseek_v3": _Family(
        num_sliding=_no_sliding,
        defaults={**_DEEPSEEK_MLA, "first_k_dense_replace": 3, "n_shared_experts": 1},
        experts=_deepseek_experts,
        has_latent_attention=True,
    ),
}
