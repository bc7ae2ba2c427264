"""Dimensions from config.json, against published parameter counts and transformers' rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from placement.errors import InvalidInput
from placement.model import ModelSpec
from placement.model_catalogue import find_model, known_config, known_models
from placement.model_config import model_spec


def found(name: str, **formats: Any) -> ModelSpec:
    spec = find_model(name, **formats)
    assert spec is not None
    return spec


def num_parameters(spec: ModelSpec) -> float:
    layers = spec.num_layers * (spec.attention_weights() + spec.ffn_weights())
    ends = 1 if spec.tie_word_embeddings else 2
    return layers + ends * spec.vocab_size * spec.hidden_size


def changed(name: str, **fields: Any) -> ModelSpec:
    known = known_config(name)
    assert known is not None
    return model_spec({**known[1], **fields}, name=name)


@pytest.mark.parametrize(
    ("name", "num_billions", "tolerance"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.134515, 3e-4),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.235815, 1e-4),
        ("meta-llama/Llama-3.2-3B-Instruct", 3.212750, 1e-4),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030261, 1e-4),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.553706, 1e-4),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.553706, 1e-4),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.248024, 1e-4),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494033, 3e-4),
        ("Qwen/Qwen2.5-7B-Instruct", 7.615617, 1e-4),
        ("Qwen/Qwen2.5-72B-Instruct", 72.706204, 1e-4),
        ("Qwen/Qwen3-0.6B", 0.596050, 3e-4),
        ("Qwen/Qwen3-8B", 8.190735, 1e-4),
        ("Qwen/Qwen3-14B", 14.768307, 1e-4),
        ("Qwen/Qwen3-32B", 32.762123, 1e-4),
        ("google/gemma-2-9b-it", 9.241706, 1e-4),
        ("google/gemma-3-27b-it", 27.009, 1e-4),
        ("microsoft/phi-2", 2.779684, 5e-4),
        ("microsoft/Phi-3-mini-4k-instruct", 3.821080, 1e-4),
        ("microsoft/phi-4", 14.659507, 1e-4),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.702793, 1e-4),
        ("Qwen/Qwen3-30B-A3B", 30.532123, 1e-4),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", 15.706484, 1e-4),
        ("deepseek-ai/DeepSeek-V3", 671.026, 1e-4),
    ],
)
def test_parameters_add_up_to_the_published_total(
    name: str, num_billions: float, tolerance: float
) -> None:
    assert num_parameters(found(name)) / 1e9 == pytest.approx(num_billions, rel=tolerance)


def test_the_catalogue_holds_at_least_ten_models() -> None:
    assert len(known_models()) >= 10
    for name, config in known_models().items():
        assert model_spec(config, name=name).name == name


def test_query_width_is_read_and_not_derived_from_the_hidden_size() -> None:
    spec = found("Qwen/Qwen3-32B")
    assert (spec.hidden_size, spec.query_size, spec.kv_size) == (5120, 8192, 1024)


def test_without_a_head_dim_it_is_the_hidden_size_over_the_heads() -> None:
    assert found("Qwen/Qwen2.5-7B-Instruct").head_dim == 128


@pytest.mark.parametrize(
    ("name", "fields", "window", "num_sliding"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.3", {}, None, 0),
        ("mistralai/Mistral-7B-Instruct-v0.3", {"sliding_window": 4096}, 4096, 32),
        ("Qwen/Qwen2.5-7B-Instruct", {}, None, 0),
        ("Qwen/Qwen2.5-7B-Instruct", {"use_sliding_window": True}, None, 0),
        (
            "Qwen/Qwen2.5-7B-Instruct",
            {"use_sliding_window": True, "max_window_layers": 20},
            131072,
            8,
        ),
        ("google/gemma-2-9b-it", {}, 4096, 21),
        ("google/gemma-2-9b-it", {"num_hidden_layers": 41}, 4096, 21),
        ("google/gemma-2-9b-it", {"sliding_window": None}, None, 0),
        ("google/gemma-3-27b-it", {}, 1024, 52),
        ("microsoft/Phi-3-mini-4k-instruct", {}, 2047, 32),
        ("microsoft/phi-4", {}, None, 0),
        ("meta-llama/Llama-3.1-8B-Instruct", {"sliding_window": 4096}, None, 0),
        (
            "Qwen/Qwen3-0.6B",
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "layer_types": ["sliding_attention"] * 9 + ["full_attention"] * 19,
            },
            512,
            9,
        ),
    ],
)
def test_windows_slide_where_the_model_says_so(
    name: str, fields: dict[str, Any], window: int | None, num_sliding: int
) -> None:
    spec = changed(name, **fields)
    assert (spec.sliding_window, spec.num_sliding_layers) == (window, num_sliding)


def test_a_missing_window_of_mistral_is_transformers_default() -> None:
    _, config = known_config("mistralai/Mistral-7B-Instruct-v0.3") or ("", {})
    without = {name: value for name, value in config.items() if name != "sliding_window"}
    assert model_spec(without).sliding_window == 4096


def test_a_nested_text_config_is_read_with_its_familys_defaults() -> None:
    spec = found("google/gemma-3-27b-it")
    assert (spec.vocab_size, spec.tie_word_embeddings, spec.num_kv_heads) == (262208, True, 16)
    small = model_spec(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
            },
        }
    )
    assert (small.num_heads, small.num_kv_heads, small.head_dim) == (8, 4, 256)
    assert num_parameters(small) / 1e9 == pytest.approx(3.88, rel=1e-2)


def test_phi_2_has_two_ffn_matrices() -> None:
    assert not found("microsoft/phi-2").is_ffn_gated


def test_experts_count_as_in_the_config() -> None:
    mixtral = found("mistralai/Mixtral-8x7B-Instruct-v0.1").experts
    assert mixtral is not None
    assert (mixtral.num, mixtral.num_per_token, mixtral.size) == (8, 2, 14336)
    deepseek = found("deepseek-ai/DeepSeek-V3")
    assert deepseek.experts is not None
    assert (deepseek.experts.num_dense_layers, deepseek.experts.shared_size) == (3, 2048)
    assert deepseek.kv_bytes_per_token() == 1152  # (512 + 64) latent elements of 2 bytes
    assert deepseek.weight_bytes == pytest.approx(1 + 4 / 128**2)
    sparse = changed("Qwen/Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[1, 3]).experts
    assert sparse is not None
    assert sparse.num_dense_layers == 26


def test_the_guide_lists_what_is_shipped() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "placement.md").read_text("utf-8")
    rows = [line.split("|")[1:3] for line in guide.splitlines() if line.startswith("| ")]
    listed = {
        f"{publisher.strip()}/{name.strip()}"
        for publisher, names in rows
        for name in names.split(",")
    }
    assert set(known_models()) <= listed


def test_a_folder_a_file_and_a_short_name_are_found(tmp_path: Path) -> None:
    _, config = known_config("phi-4") or ("", {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (str(tmp_path), str(tmp_path / "config.json"), "Phi-4"):
        assert found(name).hidden_size == 5120
    assert find_model("nobody/knows-it") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "holds a number of thousands of digits"),
        (b"\xff{}", "is not text in UTF-8 .byte 0."),
    ],
    ids=["deep", "digits", "bytes"],
)
def test_what_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        find_model(str(tmp_path))


def test_no_token_has_more_experts_than_there_are() -> None:
    for name in ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-Instruct-v0.1"):
        with pytest.raises(InvalidInput, match="num_experts_per_tok: must be at most the"):
            changed(name, num_experts_per_tok=200)
    with pytest.raises(InvalidInput, match="mlp_only_layers: must be a list"):
        changed("Qwen/Qwen3-30B-A3B", mlp_only_layers=3)


def test_a_model_that_is_a_device_is_refused() -> None:
    with pytest.raises(InvalidInput, match="/dev/zero cannot be read: it is no regular file"):
        find_model("/dev/zero")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(InvalidInput, match="is not JSON: Expecting ',' delimiter, line 1"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidInput, match="not a JSON object"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "model_type: 'lama' is not known; did you mean llama"),
        ({"model_type": None}, "model_type: is missing"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a whole number of at least 1"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers: must be at most 1000, not 100000"),
        ({"hidden_size": 10**30}, "hidden_size: must be at most 1000000, not 1000000000"),
        ({"head_dim": 10**9}, "head_dim: must be at most 1000000"),
        ({"vocab_size": "many"}, "vocab_size: must be"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: 7 must divide 32"),
        ({"hidden_size": 4097}, "hidden_size: 4097 is no multiple"),
        ({"torch_dtype": "int3"}, "config.json: torch_dtype: 'int3' is not known"),
        ({"dtype": 16}, "config.json: dtype: '16' is not known"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        changed("meta-llama/Llama-3.1-8B-Instruct", **fields)


def test_layer_types_must_cover_all_layers() -> None:
    with pytest.raises(InvalidInput, match="layer_types"):
        changed("google/gemma-2-9b-it", layer_types=["full_attention"])
