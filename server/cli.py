"""The command `shuntyard`."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from server import calibrate_cli, fleet_client, plan_parser
from server.settings import (
    Settings,
    SettingsError,
    group_of,
    load_settings,
)
from spot.errors import ShuntyardError
from workflows.simulation import command as simulation

DESCRIPTION = "OpenAI-compatible inference server for mixed and spot GPUs."
SERVE_EPILOG = """\
Every setting can also be given as an environment variable (--max-body-bytes is
SHUNTYARD_MAX_BODY_BYTES; lists with commas, objects as JSON) or in a TOML or YAML file
(--config FILE, key max_body_bytes). Flags win over the environment, which wins
over the file. vLLM's engine flags that are not listed are passed on under their
own names; an unknown flag is an error.

examples:
  shuntyard serve                                    the demo model on port 8000
  shuntyard serve ./my-model --served-model-name gpt-4o-mini my-alias
  shuntyard serve Qwen/Qwen3-8B --max-model-len 8192 --api-key alice:sk-1 bob:sk-2
"""


# Flags of vLLM's own front end, which this server replaces, and what to do instead.
_VLLM_FRONTEND_FLAGS = {
    "--disable-fastapi-docs": "use --no-docs",
    "--uvicorn-log-level": "use --log-level",
    "--disable-uvicorn-access-log": "use --no-log-requests",
    "--enable-log-requests": "requests are logged unless --no-log-requests is given",
    "--api-server-count": "one front-end process serves all",
    "--enable-request-id-headers": "request ids are always sent",
    "--enable-server-load-tracking": "/load is always there",
    "--enable-prompt-tokens-details": "cached tokens are always reported",
    "--max-num-queued-reqs": "use --max-queue-length",
    "--h11-max-incomplete-event-size": "the HTTP parser is not h11; leave it out",
    "--h11-max-header-count": "the HTTP parser is not h11; leave it out",
    "--middleware": "put a proxy in front instead",
    "--lora-modules": "serving LoRA adapters by name is not supported yet",
}


def _check_engine_flags(engine_flags: Sequence[str]) -> None:
    """Raises SettingsError for a flag of vLLM's front end, saying what stands for it here."""
    for argument in engine_flags:
        hint = _VLLM_FRONTEND_FLAGS.get(argument.split("=", 1)[0])
        if hint is not None:
            raise SettingsError(f"{argument} belongs to vLLM's own server; here, {hint}")


def _version() -> str:
    from server.version import VERSION

    return VERSION


class _CommandParser(argparse.ArgumentParser):
    """A command; its errors are one line, as all of ours are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"shuntyard: {' '.join(message.split())}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """All have to be known: else argparse complains of it where the command is forgotten."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"there is no {unknown[0]}{hint}")
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="shuntyard", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"shuntyard {_version()}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    _add_serve(commands)
    commands.add_parser(
        "doctor",
        help="print what this machine has, and what would go wrong",
        description="Print what this machine has, and what would go wrong.",
        add_help=False,
    )
    plan_parser.add_commands(commands)
    calibrate_cli.add_command(commands)
    fleet_client.add_commands(commands)
    simulation.add_command(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        usage="shuntyard serve [MODEL] [options] [engine flags of vLLM]",
        description="Serve a model to OpenAI clients.",
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("--config", metavar="FILE", help="TOML or YAML file with settings")
    groups: dict[str, Any] = {}
    for name, info in Settings.model_fields.items():
        title = group_of(info)
        if title not in groups:
            groups[title] = serve.add_argument_group(title)
        _add_setting(groups[title], name, info)


def _add_setting(group: Any, name: str, info: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = (info.description or "").replace("%", "%%")
    if info.default not in (None, [], {}, ""):
        text += f" (default: {_shown(info.default)})"
    kind = _plain_type(info.annotation)
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text, "dest": name}
    if name == "model":
        group.add_argument("model_tag", nargs="?", metavar="MODEL", help=f"the same as {flag}")
        group.add_argument(flag, metavar="MODEL", **options)
    elif kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is list:
        group.add_argument(
            flag, nargs="+", metavar=_metavar(name, kind, text), action="extend", **options
        )
    elif typing.get_origin(kind) is dict:
        group.add_argument(flag, type=_json_object, metavar="JSON", **options)
    elif typing.get_origin(kind) is typing.Literal:
        group.add_argument(flag, metavar="|".join(typing.get_args(kind)), **options)
    else:
        group.add_argument(flag, metavar=_metavar(name, kind, text), **options)


def _shown(default: Any) -> str:
    """A default as people write it."""
    match default:
        case bool():
            return "yes" if default else "no"
        case float():
            return f"{default:g}"
        case list():
            return " ".join(default)
    return str(default)


def _metavar(name: str, kind: Any, text: str) -> str:
    """What stands for a setting's value: its unit or kind, else the last word of its name."""
    if kind is float and text.startswith("seconds"):
        return "SECONDS"
    if kind in (int, float):
        return "N"
    if kind is Path:
        return "FOLDER" if text.startswith("folder") else "FILE"
    word = name.rpartition("_")[2].upper()
    return word.removesuffix("S") if typing.get_origin(kind) is list else word


def _plain_type(annotation: Any) -> Any:
    """`T` for `T | None` and for `Annotated[T, …]`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = [item for item in typing.get_args(annotation) if item is not type(None)]
        return members[0]
    return annotation


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def split_engine_flags(argv: Sequence[str], known: frozenset[str]) -> tuple[list[str], list[str]]:
    """Our arguments and vLLM's: an unknown flag takes all values up to the next flag with it.

    The model, if it is given without --model, is the first argument, so nothing else is ambiguous.
    """
    ours: list[str] = []
    engine: list[str] = []
    target = ours
    for argument in argv:
        if argument.startswith("-") and not _is_number(argument):
            name = argument.split("=", 1)[0]
            target = ours if name in known or argument in ("-h", "--help") else engine
        target.append(argument)
    return ours, engine


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _known_flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            serve = action.choices["serve"]
            return frozenset(option for item in serve._actions for option in item.option_strings)
    return frozenset()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 fine, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if arguments[:1] == ["doctor"]:
        from server import doctor

        return doctor.main(arguments[1:])
    engine_flags: list[str] = []
    if arguments[:1] == ["serve"]:
        ours, engine_flags = split_engine_flags(arguments[1:], _known_flags(parser))
        arguments = ["serve", *ours]
    flags = vars(parser.parse_args(arguments))
    command = flags.pop("command")
    if command in plan_parser.COMMANDS:
        from server import plan_cli  # imports the optimizer, which serving does not need

        return plan_cli.run(command, flags)
    if command == calibrate_cli.COMMAND:
        return calibrate_cli.run(flags)
    if command == "simulate":
        return simulation.run(flags)
    if command != "serve":
        return fleet_client.run(command, flags)
    return _serve(flags, engine_flags)


def _serve(flags: dict[str, Any], engine_flags: list[str]) -> int:
    config = flags.pop("config", None)
    positional = flags.pop("model_tag", None)
    if positional is not None:
        if "model" in flags and flags["model"] != positional:
            print("shuntyard: give the model once, not as argument and --model", file=sys.stderr)
            return 2
        flags["model"] = positional
    try:
        _check_engine_flags(engine_flags)
        settings = load_settings(flags, config=config)
        from server.serve import serve  # imports much: a wrong setting is known before

        return serve(settings, engine_flags)
    except SettingsError as error:
        print(f"shuntyard: {error.message}", file=sys.stderr)
        return 2
    except ShuntyardError as error:
        print(f"shuntyard: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run() -> NoReturn:
    """The console script: `main`, and an end without the interpreter's own.

    Libraries that come in with transformers complain of leaks when the interpreter takes them down.
    """
    code = main()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # one that was closed before
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
