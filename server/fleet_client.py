"""`shuntyard pipelines`, `drain` and `remove`: the admin API from the command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

DEFAULT_URL = "http://127.0.0.1:8000"
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|)", re.ASCII)
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


class AdminError(Exception):
    """The server said no, or nothing."""


def add_commands(commands: Any) -> None:
    """The parsers of the fleet's commands."""
    listing = commands.add_parser(
        "pipelines", help="list the pipelines of a running server", description=listed.__doc__
    )
    listing.add_argument("--json", action="store_true", help="print the server's JSON")
    drain = commands.add_parser(
        "drain", help="let a pipeline finish and go", description=drained.__doc__
    )
    drain.add_argument("id", metavar="ID", help="of the pipeline")
    drain.add_argument(
        "--deadline",
        metavar="TIME",
        type=seconds,
        default=120.0,
        help="what runs longer moves to another pipeline: 90, 120s, 2m (default: 120s)",
    )
    remove = commands.add_parser("remove", help="stop a pipeline now", description=removed.__doc__)
    remove.add_argument("id", metavar="ID", help="of the pipeline")
    for parser in (listing, drain, remove):
        parser.add_argument(
            "--url",
            default=os.environ.get("SHUNTYARD_URL") or _default_url(),
            help="of the server (SHUNTYARD_URL; default: %(default)s)",
        )
        parser.add_argument(
            "--admin-key",
            default=os.environ.get("SHUNTYARD_ADMIN_KEY"),
            help="the server's admin key (SHUNTYARD_ADMIN_KEY)",
        )


def _default_url() -> str:
    port = os.environ.get("SHUNTYARD_PORT")
    return f"http://127.0.0.1:{port}" if port else DEFAULT_URL


def seconds(text: str) -> float:
    """`90`, `120s`, `2m`, `1h` in seconds. Raises ArgumentTypeError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90, 120s, 2m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def run(command: str, flags: dict[str, Any]) -> int:
    """Run one of the commands. Returns the exit code."""
    try:
        with _client(flags) as client:
            if command == "pipelines":
                listed(client, as_json=flags["json"])
            elif command == "drain":
                drained(client, flags["id"], flags["deadline"])
            else:
                removed(client, flags["id"])
    except AdminError as error:
        print(f"shuntyard: {error}", file=sys.stderr)
        return 1
    return 0


def listed(client: httpx.Client, *, as_json: bool) -> None:
    """List the pipelines of a running server, with their state, weight and load."""
    pipelines = _call(client, "GET", "/admin/pipelines")
    if as_json:
        print(json.dumps(pipelines, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("ID", "ENGINE", "STATE", "WEIGHT", "TOKENS/S", "RUNNING", "MOVED IN/OUT", "PIDS"):
        table.add_column(title)
    for item in pipelines:
        table.add_row(
            item["id"],
            item["engine"],
            item["state"],
            f"{item['weight']:g}",
            f"{item['observed_tokens_per_s']:g}",
            f"{item['running']}/{item['seats']}",
            f"{item['migrated_in']}/{item['migrated_out']}",
            " ".join(map(str, item["pids"])),
        )
    # A pipe has no width: scripts want each pipeline on one line.
    console = Console() if sys.stdout.isatty() else Console(width=10_000)
    console.print(table)


def drained(client: httpx.Client, pipeline_id: str, deadline_s: float) -> None:
    """Take a pipeline out of service: it admits nothing more, what runs on it finishes, and what
    does not finish in time goes on elsewhere."""
    item = _call(client, "POST", f"{_path(pipeline_id)}/drain", {"deadline_s": deadline_s})
    if item["running"]:
        print(f"{item['id']} is draining: {item['running']} running, gone within {deadline_s:g} s")
    else:
        print(f"{item['id']} is gone: nothing ran on it")


def removed(client: httpx.Client, pipeline_id: str) -> None:
    """Stop a pipeline now. What runs on it goes on elsewhere."""
    item = _call(client, "DELETE", _path(pipeline_id))
    print(f"{item['id']} is gone")


def _path(pipeline_id: str) -> str:
    return f"/admin/pipelines/{quote(pipeline_id, safe='')}"


def _client(flags: dict[str, Any]) -> httpx.Client:
    headers = {}
    if flags["admin_key"]:
        headers["authorization"] = f"Bearer {flags['admin_key']}"
    return httpx.Client(base_url=flags["url"], headers=headers, timeout=30.0)


def _call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    try:
        response = client.request(method, path, json=body)
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AdminError(
            f"no server answers at {client.base_url} ({error}); say where with --url"
        ) from None
    except ValueError:
        raise AdminError(f"what answers at {client.base_url} is no Shuntyard") from None
    if response.is_error:
        raise AdminError(str(answer.get("error", {}).get("message", response.status_code)))
    return answer
