"""Where a model comes from: the demo, a folder on this machine, or the Hugging Face hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id

from server.bounded_call import call_within
from server.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from server.model_cache import ModelUnavailable, Progress, silent

__all__ = [
    "ModelUnavailable",
    "ResolvedModel",
    "check_model_folder",
    "hub_config",
    "resolve_model",
]

HUB_ANSWERS_WITHIN_S: Final = 5.0

_OTHER_FORMATS: Final = (
    *("*.gguf", "*.onnx", "onnx/*", "*.h5", "*.msgpack", "*.tflite", "*.ot"),
    *("openvino/*", "coreml/*", "original/*", "metal/*"),
)
_PICKLED_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth")
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("tekken.json", "vocab.json", "vocab.txt"),
)
_USE_A_FOLDER: Final = (
    "Serve a model that lies on this machine (`shuntyard serve ./folder`: a folder with "
    "config.json, tokenizer and safetensors), or name no model to get the demo model."
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine's disk.

    name: what clients put into `model`.
    """

    path: Path
    name: str
    is_demo: bool


def resolve_model(
    model: str | None,
    *,
    name: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """The folder of `model`, fetched if need be, and the name to serve it under.

    model: None for the demo; the path of a folder; or a name on the hub. A folder wins over a hub
        name that is spelled the same.
    name: the name to serve it under; by default `model` as it was given.
    revision, token: for the hub. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
    cache_dir: for the demo; by default `server.model_cache.default_cache_dir()`.
    Raises ModelUnavailable, within seconds if the hub does not answer.
    """
    progress = progress or silent
    if model is None or model == DEMO_MODEL_NAME:
        path = ensure_demo_model(progress=progress, cache_dir=cache_dir)
        return ResolvedModel(path, name or DEMO_MODEL_NAME, is_demo=True)
    if not model.strip():
        raise ModelUnavailable(f"The name of the model is empty. {_USE_A_FOLDER}")
    folder = Path(model).expanduser()
    if folder.is_dir():
        check_model_folder(folder)
        return ResolvedModel(folder.resolve(), name or model, is_demo=False)
    _check_hub_name(model, folder)
    path = _from_hub(model, revision, token, progress)
    check_model_folder(path)
    return ResolvedModel(path, name or model, is_demo=False)


def hub_config(model: str) -> Path:
    """The config.json of a model on the hub, or in the hub's cache where it does not answer.

    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured. Raises ModelUnavailable, within
    seconds if the hub does not answer.
    """
    _check_hub_name(model, Path(model).expanduser())
    hub_logging.set_verbosity_error()  # it tells of each retry
    try:
        if not constants.is_offline_mode():
            return call_within(2 * HUB_ANSWERS_WITHIN_S, partial(_download_config, model))
        why_not_hub = "HF_HUB_OFFLINE is set"
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{model} is gated: accept its terms on {constants.ENDPOINT}/{model} and set HF_TOKEN, "
            "or give a folder that holds its config.json."
        ) from error
    except (RepositoryNotFoundError, RemoteEntryNotFoundError) as error:
        raise ModelUnavailable(
            f"There is no {model} with a config.json on {constants.ENDPOINT} (a private one needs "
            "HF_TOKEN), and no such folder here."
        ) from error
    except (HTTPError, OSError) as error:
        why_not_hub = _first_line(error)
    try:
        return Path(hf_hub_download(model, "config.json", local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"Cannot get the config.json of {model} from {constants.ENDPOINT} ({why_not_hub}), and "
            "it is not in the hub's cache on this machine. Give a folder that holds it."
        ) from error


def _download_config(model: str) -> Path:
    _ask_hub(model, None, None)  # fails at once where a download would try again and again
    return Path(hf_hub_download(model, "config.json"))


def check_model_folder(folder: Path) -> None:
    """Raise ModelUnavailable for a folder that cannot be a model, and say what it lacks."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("no config.json")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        missing.append("no tokenizer (tokenizer.json)")
    if missing:
        raise ModelUnavailable(
            f"The folder {folder} is not a model in Hugging Face's format: it has "
            f"{' and '.join(missing)}."
        )
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnavailable(f"{folder / 'config.json'} is not a JSON object.")
    for weights in folder.glob("*.safetensors"):
        with weights.open("rb") as file:
            if file.read(20).startswith(b"version https://git"):
                raise ModelUnavailable(
                    f"{weights} is a Git LFS pointer, not the weights: run `git lfs pull` there."
                )


def _check_hub_name(model: str, folder: Path) -> None:
    """Raise ModelUnavailable if `model`, which is no folder, cannot be a name on the hub either."""
    if folder.is_file():
        raise ModelUnavailable(
            f"{model} is a file. Name the folder that holds config.json, tokenizer and safetensors."
        )
    looks_like_a_path = re.match(r"[./~\\]", model) or model.endswith("/") or model.count("/") > 1
    if looks_like_a_path:
        raise ModelUnavailable(f"There is no folder {folder.absolute()}.")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ModelUnavailable(
            f"{model!r} is neither a folder on this machine nor a name on the Hugging Face hub "
            f"(such as Qwen/Qwen3-0.6B). {_USE_A_FOLDER}"
        ) from error


def _from_hub(model: str, revision: str | None, token: str | None, progress: Progress) -> Path:
    """The snapshot of `model`: from the hub or, where that does not answer, from its cache."""
    if constants.is_offline_mode():
        return _from_hub_cache(model, revision, "HF_HUB_OFFLINE is set")
    progress(f"Looking for {model} on {constants.ENDPOINT}")
    try:
        info = call_within(HUB_ANSWERS_WITHIN_S, partial(_ask_hub, model, revision, token))
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{model} is gated: accept its terms on {constants.ENDPOINT}/{model}, and give a token "
            "of that account with --hf-token or HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelUnavailable(f"{model} has no revision {revision!r} on the hub.") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"There is no model {model} on {constants.ENDPOINT}, and no such folder here. If it is "
            f"private, give a token with --hf-token or HF_TOKEN. {_USE_A_FOLDER}"
        ) from error
    except (HTTPError, OSError) as error:
        return _from_hub_cache(model, revision, _first_line(error))
    names = [file.rfilename for file in info.siblings or ()]
    has_safetensors = any(fnmatch(name, "*.safetensors") for name in names)
    ignored = _OTHER_FORMATS + (_PICKLED_WEIGHTS if has_safetensors else ())
    progress(f"Downloading {model} to {constants.HF_HUB_CACHE}")
    try:
        return Path(
            snapshot_download(model, revision=revision, token=token, ignore_patterns=list(ignored))
        )
    except (HTTPError, OSError) as error:
        raise ModelUnavailable(
            f"The download of {model} broke off: {_first_line(error)}. What came is kept; starting "
            f"again goes on from there."
        ) from error


def _from_hub_cache(model: str, revision: str | None, why_not_hub: str) -> Path:
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                local_files_only=True,
                ignore_patterns=list(_OTHER_FORMATS + _PICKLED_WEIGHTS),
            )
        )
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"Cannot get {model} from {constants.ENDPOINT} ({why_not_hub}), and it is not, or not "
            f"whole, in the hub's cache on this machine ({constants.HF_HUB_CACHE}). {_USE_A_FOLDER}"
        ) from error


def _ask_hub(model: str, revision: str | None, token: str | None) -> Any:
    return HfApi(token=token).model_info(model, revision=revision, timeout=HUB_ANSWERS_WITHIN_S)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
