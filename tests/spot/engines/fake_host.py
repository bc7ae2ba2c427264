"""A tiny engine host for tests: speaks the codec, generates nothing but what it is told to.

`mode` in the engine arguments says how it behaves; see the functions below.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

from spot.engines.base import EngineCard, EngineStats
from spot.engines.codec import (
    Abort,
    Dead,
    Failed,
    FrameReader,
    HandleDelta,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Step,
    Stop,
    Submit,
    ToGateway,
    encode_frame,
    to_host_decoder,
)
from spot.generation import TokenDelta

CARD = EngineCard(max_model_len=64, vocab_size=100, engine="fake")


class FakeHost:
    """Echoes prompts token by token, unless `mode` says otherwise."""

    def __init__(self, connection: socket.socket, args: dict[str, Any]) -> None:
        self._connection = connection
        self._mode = args["mode"]
        self._args = args
        self._held: set[int] = set()
        self._num_messages = 0

    def say(self, message: ToGateway) -> None:
        self._connection.sendall(encode_frame(message))

    def run(self) -> None:
        self.say(Progress("warming up the fake"))
        getattr(self, f"start_{self._mode}", self.start)()
        frames = FrameReader()
        while chunk := self._connection.recv(65536):
            for payload in frames.feed(chunk):
                self.take(to_host_decoder.decode(payload))

    def start(self) -> None:
        self.say(Ready(CARD, [os.getpid()]))

    def start_fatal(self) -> NoReturn:
        self.say(Dead("no such flag: --frobnicate", fatal=True))
        sys.exit(1)

    def start_misconfigured(self) -> NoReturn:
        self.say(Dead("--block-size: too odd", fatal=True, is_misconfigured=True))
        sys.exit(1)

    def start_crash_at_start(self) -> NoReturn:
        print("ValueError: the model folder is empty", file=sys.stderr, flush=True)
        sys.exit(1)

    def start_never_ready(self) -> None:
        time.sleep(3600)

    def start_silent(self) -> None:
        self.start()
        time.sleep(3600)

    def start_garbage(self) -> None:
        self._connection.sendall(b"\x03\x00\x00\x00abc")

    def start_with_child(self) -> None:
        child = subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL)
        self.say(Ready(CARD, [os.getpid(), child.pid]))

    def start_crash_once(self) -> None:
        """Crash on the first submit of the first life only."""
        self.start()

    def take(self, message: Any) -> None:
        match message:
            case Ping():
                self.say(Pong(message.number))
            case Stop():
                sys.exit(0)
            case Submit():
                self.submit(message)
            case Abort():
                self._held -= set(message.handles)
                self.say(Step([], EngineStats(running=len(self._held))))

    def submit(self, submit: Submit) -> None:
        handle = submit.handle
        match self._mode:
            case "hold":
                self._held.add(handle)
                self.say(Step([], EngineStats(running=len(self._held))))
            case "complain_and_crash":
                print("RuntimeError: out of pages", file=sys.stderr, flush=True)
                os._exit(3)
            case "dead_with_words":
                print("RuntimeError: out of pages", file=sys.stderr, flush=True)
                self.say(Dead("the engine core was killed by SIGKILL"))
                time.sleep(3600)
            case "crash_on_submit" | "with_child":
                os._exit(3)
            case "crash_once":
                self.crash_once(submit)
            case "close_on_submit":
                self._connection.shutdown(socket.SHUT_RDWR)
                time.sleep(3600)
            case "dead_on_submit":
                self.say(Dead("the engine core died"))
                sys.exit(1)
            case "refuse":
                self.say(Refused(handle, "bad regex", "structured"))
            case "fail":
                self.say(Failed(handle, "lost its KV"))
            case "fail_everywhere":
                self.say(Failed(handle, "a bug", everywhere=True))
            case _:
                self.echo(submit)

    def crash_once(self, submit: Submit) -> None:
        marker = self._args["marker"]
        if os.path.exists(marker):
            self.echo(submit)
        else:
            with open(marker, "w"):
                os._exit(3)

    def echo(self, submit: Submit) -> None:
        *first, last = submit.generation.prompt_token_ids
        for token_id in first:
            self.say(Step([HandleDelta(submit.handle, TokenDelta([token_id]))]))
        self.say(Step([HandleDelta(submit.handle, TokenDelta([last], finish_reason="length"))]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    args = json.loads(sys.stdin.read())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(parser.parse_args().socket)
    FakeHost(connection, args).run()


if __name__ == "__main__":
    main()
