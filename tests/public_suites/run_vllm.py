"""Runs vLLM's own tests of its OpenAI server against a running server of ours.

    python tests/public_suites/run_vllm.py --url http://127.0.0.1:8000

The server is to be started with

    shuntyard serve --max-model-len 8192 --enable-auto-tool-choice --tool-call-parser hermes \\
        --embedding-model demo --structured-outputs-config \\
        '{"backend": "xgrammar", "disable_any_whitespace": true}'

(the last so that the small model does not fill its JSON with white space).

vLLM's source distribution is fetched by pip and kept in the cache folder; its tests are extracted
there, never copied into this repository. Names of models in them are replaced by those served here;
vllm_plugin.py stands in for the rest. vllm_suite.toml lists the files that are run, what does not
apply and why, and in what we differ on purpose and why.

Prints a table per file and the failures, writes everything as JSON with --json, and exits with 1
if a test fails that is not listed as a deviation. It needs the development environment and takes
some minutes; `make test` does not run it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from server.demo_model import ensure_demo_embedding_model, ensure_demo_model  # noqa: E402
from server.model_cache import default_cache_dir  # noqa: E402

RULES: Final[dict[str, Any]] = tomllib.loads((HERE / "vllm_suite.toml").read_text())
EXTRAS: Final = ("pytest-asyncio==1.3.0",)
PYTEST_INI: Final = """\
[pytest]
timeout = 300
asyncio_default_fixture_loop_scope = function
markers =
    cpu_test: vLLM's
    skip_global_cleanup: vLLM's
"""
SHOWN_OUTCOMES: Final = ("passed", "failed", "deviates", "not applicable")

# pip has no command that only fetches a source distribution: `pip download` builds its metadata,
# for which it would install vLLM's build requirements. So pip's own parts find and fetch it.
FETCH: Final = """\
import sys
from pip._internal.commands import create_command
from pip._internal.network.download import Downloader

version, folder = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options=options, session=session)
    found = [c for c in finder.find_all_candidates("vllm") if str(c.version) == version]
    print(Downloader(session, "off")(found[0].link, folder)[0])
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the running server")
    parser.add_argument("--version", default="0.32.0", help="the release of vLLM")
    parser.add_argument("--sdist", type=Path, help="its source distribution, instead of fetching")
    parser.add_argument("--json", type=Path, help="where to write all outcomes")
    parser.add_argument("-k", help="only tests whose names match, as for pytest")
    parser.add_argument("files", nargs="*", help="only these files, by parts of their paths")
    options = parser.parse_args()

    url = options.url.rstrip("/")
    models = served_models(url)
    cache = default_cache_dir() / f"vllm-{options.version}"
    cache.mkdir(parents=True, exist_ok=True)
    sdist = options.sdist or fetch(options.version, cache)
    install_extras(cache / "extras")
    with tempfile.TemporaryDirectory(prefix="vllm-suite-") as scratch:
        suite = extract(sdist, Path(scratch), models)
        files = [
            name
            for name in RULES["files"]
            if not options.files or any(part in name for part in options.files)
        ]
        outcomes = run(suite, files, url, models, cache / "extras", options.k)
    report = judge(outcomes)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return show(report)


def served_models(url: str) -> dict[str, str]:
    """The names of the main model and of the embedding model."""
    data = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    embedding = [model["id"] for model in data if "max_model_len" not in model]
    return {"generate": data[0]["id"], "embed": embedding[0] if embedding else "none"}


def fetch(version: str, cache: Path) -> Path:
    for found in cache.glob("vllm-*.tar.gz"):
        return found
    print(f"fetching the source distribution of vLLM {version}")
    command = [sys.executable, "-c", FETCH, version, str(cache)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


def install_extras(folder: Path) -> None:
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), *EXTRAS], check=True)


def extract(sdist: Path, scratch: Path, models: dict[str, str]) -> Path:
    """Their tests in `scratch`, with our names for models and our stand-in for the server."""
    with tarfile.open(sdist) as archive:
        wanted = [member for member in archive if "/tests/" in member.name and member.isfile()]
        kept = [m for m in wanted if m.name.endswith((".py", ".jinja", ".json"))]
        archive.extractall(scratch, members=kept, filter="data")
    (suite,) = scratch.iterdir()
    for path in (suite / "tests").rglob("*.py"):
        text = path.read_text()
        kind = "embed" if "pooling" in path.parts else "generate"
        changed = re.sub(RULES["model_names"], f'"{models[kind]}"', text)
        for old, new in RULES["rewrites"].get(str(path.relative_to(suite / "tests")), {}).items():
            changed = changed.replace(old, new)
        if changed != text:
            path.write_text(changed)
    for name in ("conftest", "utils"):
        (suite / "tests" / f"{name}.py").write_text("from vllm_plugin import *\n")
    (suite / "pytest.ini").write_text(PYTEST_INI)
    return suite


def run(
    suite: Path, files: list[str], url: str, models: dict[str, str], extras: Path, only: str | None
) -> dict[str, dict[str, str]]:
    """Outcome and detail by the short name of the test."""
    results = suite / "results.json"
    tokenizers = {
        models["generate"]: str(ensure_demo_model()),
        models["embed"]: str(ensure_demo_embedding_model()),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(suite), str(HERE), str(extras)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_SUITE_URL": url,
        "VLLM_SUITE_TOKENIZERS": json.dumps(tokenizers),
        "VLLM_SUITE_RESULTS": str(results),
    }
    command = [sys.executable, "-m", "pytest", "-p", "vllm_plugin", "-p", "no:cacheprovider"]
    command += ["-c", "pytest.ini", "--rootdir", ".", "-q", "--tb=short"]
    command += ["--continue-on-collection-errors"]
    command += [*(["-k", only] if only else []), *(f"tests/{name}" for name in files)]
    subprocess.run(command, cwd=suite, env=environment, check=False)
    return dict(json.loads(results.read_text()))


def judge(outcomes: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """One row per test: passed, failed, deviates (on purpose) or not applicable, and why."""
    rows = []
    for name, result in sorted(outcomes.items()):
        reason = next(
            (r for p, r in RULES["deviations"].items() if fnmatch.fnmatchcase(name, p)), None
        )
        row = {"test": name, "outcome": result["outcome"], "detail": result["detail"]}
        if result["outcome"] == "skipped":
            row["outcome"] = "not applicable"
        elif result["outcome"] == "failed" and reason is not None:
            row |= {"outcome": "deviates", "reason": reason}
        rows.append(row)
    return rows


def show(report: list[dict[str, str]]) -> int:
    """Print the table and what went wrong; the exit code."""
    by_file: dict[str, Counter[str]] = {}
    for row in report:
        by_file.setdefault(row["test"].partition("::")[0], Counter())[row["outcome"]] += 1
    width = max(map(len, by_file), default=0)
    print("\n" + " " * width, *(f"{outcome:>14}" for outcome in SHOWN_OUTCOMES))
    for name, counts in [*by_file.items(), ("all", sum(by_file.values(), Counter()))]:
        print(f"{name:{width}}", *(f"{counts[outcome]:>14}" for outcome in SHOWN_OUTCOMES))
    failed = [row for row in report if row["outcome"] == "failed"]
    for title, outcome, key in (
        ("Not applicable", "not applicable", "detail"),
        ("Deviations", "deviates", "reason"),
    ):
        print(f"\n{title}:")
        for row in report:
            if row["outcome"] == outcome:
                print(f"  {row['test']}: {row[key].splitlines()[0]}")
    for row in failed:
        print(f"\nFAILED {row['test']}\n{row['detail']}")
    print(f"\n{len(report)} tests, {len(failed)} unexpected failures")
    return 1 if failed or not report else 0


if __name__ == "__main__":
    raise SystemExit(main())
