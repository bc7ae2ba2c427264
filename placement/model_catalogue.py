"""The config.json of well-known models, for planning without the hub, and those on this machine.

The files in `data/models` hold the dimensions that each model's publisher states in its config.json
on the Hugging Face hub, retyped; what does not bear on time and memory is left out.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from placement.errors import InvalidInput, user_path, why_unreadable
from placement.model import ModelSpec
from placement.model_config import model_spec
from placement.regular_file import read_regular_file


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """The shipped configs by their names on the hub."""
    return {
        path.name.removesuffix(".json").replace("--", "/"): json.loads(path.read_text("utf-8"))
        for path in sorted(_files(), key=lambda path: path.name.casefold())
    }


def _files() -> Iterator[Any]:
    folder = resources.files("placement") / "data" / "models"
    return (path for path in folder.iterdir() if path.name.endswith(".json"))


def known_config(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """The full name and config of a shipped model, by its name on the hub or the part behind the
    slash; None if there is none."""
    wanted = name.casefold()
    for full, config in known_models().items():
        if wanted in (full.casefold(), full.rpartition("/")[2].casefold()):
            return full, config
    return None


def local_config(path: Path) -> Mapping[str, Any]:
    """The config.json at `path`, which is the file or its folder. Raises InvalidInput."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_regular_file(file).decode("utf-8-sig"))
    except FileNotFoundError:
        raise InvalidInput("model", f"{path} has no config.json") from None
    except json.JSONDecodeError as error:
        place = f"{error.msg}, line {error.lineno}"
        raise InvalidInput("model", f"{file} is not JSON: {place}") from None
    except RecursionError:
        raise InvalidInput("model", f"{file} is nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("model", f"{file} {why_unreadable(error)}") from None
    except ValueError:
        raise InvalidInput("model", f"{file} holds a number of thousands of digits") from None
    if not isinstance(config, dict):
        raise InvalidInput("model", f"{file} is not a JSON object")
    return config


def find_model(name: str, **formats: Any) -> ModelSpec | None:
    """The spec of a model on this machine or of the catalogue; None if it is neither.

    formats: dtype, quantization and kv_cache_dtype, as for `model_spec`.
    """
    path = user_path(name)
    if os.path.exists(path):  # no for a name that no file can have
        return model_spec(local_config(path), name=name, **formats)
    if (known := known_config(name)) is not None:
        full, config = known
        return model_spec(config, name=full, **formats)
    return None
