"""Where a model comes from, and what is said when it cannot be had."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from server import model_source
from server.model_source import ModelUnavailable, ResolvedModel, hub_config, resolve_model
from spot.errors import ShuntyardError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL_FILES = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"weights"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    for name, content in MODEL_FILES.items():
        (folder / name).write_bytes(content)
    return folder


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ModelUnavailable) as raised:
        resolve_model(model, **options)
    assert isinstance(raised.value, ShuntyardError)
    return raised.value.message


def test_no_name_is_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_source, "ensure_demo_model", lambda **_: tmp_path)
    assert resolve_model(None) == ResolvedModel(tmp_path, "SmolLM2-135M-Instruct", is_demo=True)
    assert resolve_model("SmolLM2-135M-Instruct").is_demo
    assert resolve_model(None, name="tiny").name == "tiny"


def test_a_folder_is_served_under_the_name_it_was_given_as(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model("./my-model") == ResolvedModel(folder, "./my-model", is_demo=False)
    assert resolve_model("my-model", name="other") == ResolvedModel(folder, "other", is_demo=False)


def test_a_folder_that_is_no_model_says_what_it_lacks(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(str(folder)).endswith(f"{folder} is not a model in Hugging Face's format: "
                                         "it has no config.json.")  # fmt: skip
    (folder / "tokenizer.json").unlink()
    assert "no config.json and no tokenizer" in refusal(str(folder))


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    assert f"{folder}/config.json cannot be read" in refusal(str(folder))
    (folder / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(str(folder))


def test_a_clone_without_its_large_files_is_noticed(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(str(folder))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere", "~/nowhere", "a/b/c", "nowhere/"])
def test_a_path_without_a_folder_is_not_sought_on_the_hub(path: str) -> None:
    assert refusal(path).startswith("There is no folder /")


@pytest.mark.parametrize("name", ["we ird!!", "a--b/c..d", "org/na me", "x" * 200, "-x"])
def test_a_name_that_is_neither_is_refused(name: str) -> None:
    assert "neither a folder on this machine nor a name on the Hugging Face hub" in refusal(name)


def test_an_empty_name_and_a_file_are_refused(folder: Path) -> None:
    assert "empty" in refusal(" ")
    assert "is a file" in refusal(str(folder / "config.json"))


@dataclass
class FakeHub:
    """As much of the hub as a download needs. `status` and `error` answer instead, if set."""

    url: str = ""
    status: int = 200
    error: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(MODEL_FILES))
    downloads: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    silent: threading.Event | None = None

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        if self.silent is not None:
            self.silent.wait(10)
        path = request.path.partition("?")[0]
        if "/org/model" not in path:
            return 404, {}, b""
        self.tokens.add(request.headers.get("Authorization"))
        if self.status != 200:
            return self.status, {"X-Error-Code": self.error, "X-Error-Message": self.error}, b""
        if path == "/api/models/org/model" or "/revision/" in path:
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            return 200, {}, json.dumps(info).encode()
        if path == f"/api/models/org/model/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": etag(content)}
                for name, content in self.files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        name = path.removeprefix("/org/model/resolve/").partition("/")[2]
        content = self.files[name]
        if request.command == "GET":
            self.downloads.append(name)
        return 200, {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT}, content


def etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub on a port of this machine, with an empty cache of its own."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = hub.answer(self)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    use_hub(monkeypatch, hub.url, tmp_path / "hub")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield hub
    if hub.silent is not None:
        hub.silent.set()
    server.shutdown()
    server.server_close()
    thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)


def test_a_hub_name_is_downloaded_once_and_kept(hub: FakeHub) -> None:
    hub.files |= {"pytorch_model.bin": b"pickle", "model.gguf": b"gguf", "onnx/model.onnx": b"onnx"}
    lines: list[str] = []
    resolved = resolve_model("org/model", token="hf_secret", progress=lines.append)
    assert (resolved.name, resolved.is_demo) == ("org/model", False)
    assert sorted(path.name for path in resolved.path.iterdir()) == sorted(MODEL_FILES)
    assert resolve_model("org/model", token="hf_secret") == resolved
    assert sorted(hub.downloads) == sorted(MODEL_FILES)
    assert hub.tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in "".join(lines)


def test_pickled_weights_are_taken_where_there_are_no_others(hub: FakeHub) -> None:
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    assert (resolve_model("org/model").path / "pytorch_model.bin").is_file()


def test_what_was_downloaded_is_served_when_the_hub_is_gone(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve_model("org/model")
    hub.status = 503
    assert resolve_model("org/model") == resolved
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/model") == resolved


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (404, "RepoNotFound", "There is no model org/model on http"),
        (403, "GatedRepo", "accept its terms"),
        (404, "RevisionNotFound", "has no revision 'v9'"),
        (500, "", "500 Internal Server Error"),
    ],
)
def test_the_hubs_refusal_is_passed_on(hub: FakeHub, status: int, error: str, said: str) -> None:
    hub.status, hub.error = status, error
    assert said in refusal("org/model", revision="v9")


def test_a_hub_model_that_is_no_language_model_is_refused(hub: FakeHub) -> None:
    del hub.files["config.json"]
    assert "no config.json" in refusal("org/model")


def test_a_silent_hub_is_given_up_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.silent = threading.Event()
    monkeypatch.setattr(model_source, "HUB_ANSWERS_WITHIN_S", 0.2)
    assert "shuntyard serve ./folder" in refusal("org/model")


def test_without_a_network_it_fails_at_once_and_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub")
    began_s = time.monotonic()
    message = refusal("org/model")
    assert time.monotonic() - began_s < 5
    assert (
        "Cannot get org/model from http://127.0.0.1:9 ([Errno 111] Connection refused)" in message
    )
    assert "shuntyard serve ./folder" in message


def test_offline_is_said_to_be_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("org/model")


def config_refusal() -> str:
    with pytest.raises(ModelUnavailable) as raised:
        hub_config("org/model")
    return raised.value.message


def test_a_config_alone_is_downloaded_and_kept(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hub_config("org/model")
    assert path.read_bytes() == b"{}"
    assert hub.downloads == ["config.json"]
    hub.status = 503
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_config("org/model") == path


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (404, "RepoNotFound", "There is no org/model with a config.json on http"),
        (403, "GatedRepo", "accept its terms on http"),
        (500, "", "500 Internal Server Error"),
    ],
)
def test_why_a_config_cannot_be_had_is_told(
    hub: FakeHub, status: int, error: str, said: str
) -> None:
    hub.status, hub.error = status, error
    assert said in config_refusal()


def test_a_config_without_a_network_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub")
    began_s = time.monotonic()
    message = config_refusal()
    assert time.monotonic() - began_s < 5
    assert "([Errno 111] Connection refused)" in message
    assert "Give a folder that holds it." in message


def test_paths_are_not_asked_of_the_hub() -> None:
    with pytest.raises(ModelUnavailable, match="no folder"):
        hub_config("./nowhere")
