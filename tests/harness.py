"""The real application under a real uvicorn on a loopback port, in a thread of its own.

    with serving(script="Hello there.") as server:
        assert server.chat("Hi").json()["choices"][0]["message"]["content"] == "Hello there."

The engine is scripted; everything before and behind it is what serves in production. Leaving the
block stops the server and checks that nothing was left behind: no request in flight, no generation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx
import uvicorn
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from server.app import HttpOptions, build_app
from server.demo_model import ensure_demo_model
from server.errors import ShuttingDown
from server.gateway import Admission, ChatOptions, Gateway, Limits, ServedModel
from server.http_protocol import HttpProtocol, http_protocol
from server.journal import Journal
from server.journal_metrics import JournalMetrics
from server.logs import RequestLog
from server.metrics import Metrics
from server.sampling import SamplingDefaults
from server.sse import StreamKeeper
from server.text.tokenizer import ChatTokenizer
from server.version import INSTANCE
from server.workflow_metrics import WorkflowMetrics
from spot.engines.base import Engine
from spot.engines.scripted import Faults, Script, ScriptedEngine
from spot.failover_policy import FailoverPolicy
from spot.fleet import Fleet, PipelineSpec
from spot.generation import Generation
from spot.kept_outputs import KeptOutputs
from workflows.service import WorkflowService
from workflows.slots import Slots

MODEL = "demo"
HOST = "127.0.0.1"

T = TypeVar("T")


@cache
def demo_tokenizer() -> ChatTokenizer:
    """The demo model's tokenizer and template, loaded once per session."""
    return ChatTokenizer.load(ensure_demo_model())


def say(tokenizer: ChatTokenizer, text: str) -> Script:
    """A script that emits exactly the tokens of `text`, then ends."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return lambda generation: ids


def say_each(tokenizer: ChatTokenizer, *texts: str) -> Script:
    """A script for several choices: choice `i` says `texts[i]`, the last of them from there on."""
    scripts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return lambda generation: scripts[min(choice_of(generation), len(scripts) - 1)]


def choice_of(generation: Generation) -> int:
    """The index of the choice that a generation is for."""
    return int(generation.id.rpartition("-")[2])


def byte_tokens(tokenizer: ChatTokenizer, data: bytes) -> list[int]:
    """One token per byte, for sequences that no tokenizer would make from text."""
    by_bytes = _single_byte_tokens(tokenizer)
    return [by_bytes[byte] for byte in data]


@cache
def _single_byte_tokens(tokenizer: ChatTokenizer) -> dict[int, int]:
    found: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        if len(raw) == 1 and token_id not in tokenizer.added:
            found[raw[0]] = token_id
    return found


@dataclass(slots=True)
class Streamed:
    """An event stream as it came over the wire."""

    status: int
    headers: httpx.Headers
    raw: bytes

    @property
    def events(self) -> list[str]:
        """The data of each event, `[DONE]` included; checks the framing."""
        text = self.raw.decode("utf-8")
        assert text.endswith("\n\n"), f"the stream ends inside an event: {text[-80:]!r}"
        result = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            if block.startswith(":"):
                continue
            if block.startswith("id: "):
                block = block.partition("\n")[2]
            assert block.startswith("data: "), f"not an event: {block!r}"
            assert "\n" not in block, f"a line break inside an event: {block!r}"
            result.append(block.removeprefix("data: "))
        return result

    @property
    def comments(self) -> list[str]:
        blocks = self.raw.decode("utf-8").split("\n\n")
        return [block for block in blocks if block.startswith(":")]

    @property
    def is_done(self) -> bool:
        """Whether `[DONE]` came, once and last."""
        events = self.events
        return events.count("[DONE]") == 1 and events[-1] == "[DONE]"

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error frame, if there is one; nothing but `[DONE]` may follow it."""
        objects = self.objects
        errors = [item["error"] for item in objects if "error" in item]
        if not errors:
            return None
        assert len(errors) == 1
        assert "error" in objects[-1]
        return dict(errors[0])

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [item for item in self.objects if "error" not in item]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """The pieces of one choice in order."""
        return [
            choice
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]

    def text(self, index: int = 0, *, part: str = "content") -> str:
        """A choice's text joined: a part of its deltas, or the texts of a text completion."""
        joined = ""
        for choice in self.choices(index):
            joined += (choice["text"] if "text" in choice else choice["delta"].get(part)) or ""
        return joined

    def tool_calls(self, index: int = 0) -> list[dict[str, Any]]:
        """A choice's tool calls put together by index, as a client does; strict about the shape."""
        calls: dict[int, dict[str, Any]] = {}
        for choice in self.choices(index):
            for delta in choice["delta"].get("tool_calls", []):
                position = delta["index"]
                if position not in calls:
                    assert position == len(calls), "tool call indexes count from 0"
                    assert delta["type"] == "function"
                    calls[position] = {
                        "id": delta["id"],
                        "type": "function",
                        "function": {"name": delta["function"]["name"], "arguments": ""},
                    }
                else:
                    assert "id" not in delta
                    assert "name" not in delta["function"]
                assert isinstance(delta["function"]["arguments"], str)
                calls[position]["function"]["arguments"] += delta["function"]["arguments"]
        return [calls[position] for position in sorted(calls)]

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage chunk's figures; it has no choices and is the last chunk."""
        lone = [chunk for chunk in self.chunks if not chunk["choices"]]
        if not lone:
            return None
        assert len(lone) == 1
        assert self.chunks[-1] == lone[0]
        return dict(lone[0]["usage"])


@dataclass(slots=True)
class Server:
    """A running server, its parts, and clients for it."""

    port: int
    engine: ScriptedEngine
    gateway: Gateway
    tokenizer: ChatTokenizer
    _loop: _LoopThread
    _fleet: Fleet | None = None
    _clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _http: httpx.Client | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def http(self) -> httpx.Client:
        """A client with this server as its base URL."""
        if self._http is None:
            self._http = self._clients.enter_context(
                httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=20)
            )
        return self._http

    def openai(self, **options: Any) -> OpenAI:
        """The official client. No retries, so that a failure shows itself."""
        options = {"api_key": "none", "max_retries": 0, **options}
        transport = httpx.Client(trust_env=False, verify=False, timeout=20)
        client = OpenAI(base_url=f"{self.url}/v1", http_client=transport, **options)
        return self._clients.enter_context(client)

    @property
    def fleet(self) -> Fleet:
        assert self._fleet is not None, "this server has no spare"
        return self._fleet

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def stream(self, path: str, body: Any, **options: Any) -> Streamed:
        """POST with `stream: true`, read to the end."""
        response = self.http.post(path, json={**body, "stream": True}, **options)
        return Streamed(response.status_code, response.headers, response.content)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(content, **fields))

    def stream_chat(self, content: str = "Hi", **fields: Any) -> Streamed:
        return self.stream("/v1/chat/completions", chat_body(content, **fields))

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def stream_complete(self, prompt: Any = "Hi", **fields: Any) -> Streamed:
        return self.stream("/v1/completions", {"prompt": prompt, **fields})

    def connect(self, *, receive_buffer: int | None = None, timeout_s: float = 10) -> socket.socket:
        """A bare connection; the caller closes it."""
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(timeout_s)
        connection.connect((HOST, self.port))
        return connection

    def exchange(self, raw: bytes) -> bytes:
        """Send bytes on a connection of their own and read until the server closes it."""
        with self.connect() as connection:
            connection.sendall(raw)
            received = b""
            while data := connection.recv(65536):
                received += data
            return received

    @property
    def load(self) -> int:
        return int(self.http.get("/load").json()["server_load"])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels, over HTTP."""
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function on the server's own event loop thread."""
        return self._loop.call(function, *args)

    def num_buffered_bytes(self) -> int:
        """What waits in the server's memory for slow readers. Only for `call`."""
        connections = self._loop.uvicorn.server_state.connections
        return sum(c.transport.get_write_buffer_size() for c in connections)  # type: ignore[union-attr]

    def close(self) -> None:
        self._clients.close()


def chat_body(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def http_request(
    path: str, body: bytes, *, version: str = "1.1", headers: Sequence[str] = ()
) -> bytes:
    """A POST with a JSON body, as bytes."""
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def until(condition: Callable[[], Any], *, within_s: float = 2.0) -> None:
    """Wait until a condition holds; fails when it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(
    script: Script | str | Sequence[int] | None = None,
    *,
    faults: Faults | None = None,
    names: Sequence[str] = (MODEL,),
    tokenizer: ChatTokenizer | None = None,
    defaults: SamplingDefaults | None = None,
    chat: ChatOptions | None = None,
    http: HttpOptions | None = None,
    limits: Limits | None = None,
    max_model_len: int = 4096,
    max_num_seqs: int = 256,
    step_time_s: float = 0.0005,
    tokens_per_step: int = 1,
    max_requests: int = 10_000,
    max_queue: int = 10_000,
    keep_alive_s: float = 0.0,
    idle_s: float = 75.0,
    arrival_s: float = 60.0,
    stalled_reader_s: float = 60.0,
    send_buffer: int | None = None,
    salt_secret: bytes | None = None,
    log: RequestLog | None = None,
    further_routes: Callable[[Gateway], Sequence[BaseRoute]] | None = None,
    further_models: Sequence[tuple[str, int]] = (),
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    spare: bool = False,
    policy: FailoverPolicy | None = None,
    journal: Path | Journal | None = None,
    instance: str = INSTANCE,
    kept_outputs: KeptOutputs | None = None,
) -> Iterator[Server]:
    """Serve with a scripted engine.

    spare: a second engine like the first takes over what the first one loses; the first is chosen
        as long as it serves. policy: when.

    script: a script, the text to say, the token ids to emit, or None for the seeded model.
    idle_s, arrival_s: the connection's deadlines.
    send_buffer: bytes that the kernel takes for a client that does not read.
    further_routes: makes routes from the gateway, as the composition root does.
    wrap: puts something around the whole application.
    journal: a folder for the journal of generations, or the journal itself.
    instance: what the server says of itself.
    kept_outputs: where outputs are kept; with it equal generations are one.
    """
    tokenizer = tokenizer or demo_tokenizer()
    assert tokenizer.eos_token_id is not None
    vocab_size, eos_token_id = tokenizer.vocab_size, tokenizer.eos_token_id

    def new_engine(faults: Faults | None) -> ScriptedEngine:
        return ScriptedEngine(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            script=_as_script(tokenizer, script),
            step_time_s=step_time_s,
            tokens_per_step=tokens_per_step,
            faults=faults,
        )

    slots = Slots()
    engine = new_engine(faults)
    served: Engine = engine
    fleet: Fleet | None = None
    if spare:
        specs = [PipelineSpec("first", engine, 1e6), PipelineSpec("spare", new_engine(None))]
        served = fleet = Fleet(
            specs,
            policy=policy,
            on_subnode=slots.attained,
            on_capacity=partial(slots.set_slots, "llm"),
            on_pipelines=(lambda: None) if kept_outputs is None else kept_outputs.clear,
        )
        slots.on_reprioritise = fleet.reprioritise
    gateway = Gateway(
        model=ServedModel(
            names=list(names),
            tokenizer=tokenizer,
            engine=served,
            defaults=defaults or SamplingDefaults(),
            chat=chat or ChatOptions(),
        ),
        metrics=Metrics(names[0]),
        admission=Admission(max_requests=max_requests, max_queue=max_queue),
        keeper=StreamKeeper(keep_alive_s=keep_alive_s, stalled_reader_s=stalled_reader_s),
        limits=limits or Limits(),
        salt_secret=salt_secret,
        version="0.0-test",
        instance=instance,
        journal=Journal(journal, now_s=time.time) if isinstance(journal, Path) else journal,
        workflows=WorkflowService(slots),
        shares_equal=kept_outputs is not None,
        kept_outputs=kept_outputs,
    )
    gateway.metrics.registry.register(WorkflowMetrics(gateway.workflows))
    if gateway.journal is not None:
        gateway.journal.open()
        gateway.metrics.registry.register(JournalMetrics(gateway.journal))
    app: ASGIApp = build_app(
        gateway,
        options=http,
        log=log or RequestLog(enabled=False),
        further_routes=further_routes(gateway) if further_routes else (),
        further_models=further_models,
    )
    protocol = http_protocol(idle_s=idle_s, arrival_s=arrival_s)
    thread = _LoopThread(wrap(app) if wrap else app, gateway, engine, served, protocol)
    port = thread.start(send_buffer)
    server = Server(port, engine, gateway, tokenizer, thread, fleet)
    try:
        yield server
    finally:
        server.close()
        thread.stop()
        if gateway.journal is not None:
            gateway.journal.close()
    assert gateway.admission.num_requests == 0, "a request was left in flight"
    assert gateway.admission.num_generations == 0, "a generation was left in flight"
    assert not gateway.live, "a run was left behind"
    assert not gateway.workflows.num_active, "a workflow was left behind"
    assert thread.num_left_in_engine == 0, "a generation was left in the engine"


def _as_script(
    tokenizer: ChatTokenizer, script: Script | str | Sequence[int] | None
) -> Script | None:
    if script is None or callable(script):
        return script
    if isinstance(script, str):
        return say(tokenizer, script)
    return lambda generation: script


class _Uvicorn(uvicorn.Server):
    """Uvicorn that tells when it has started, and stops at once instead of at its next tick."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell_started = started
        self.stop = anyio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self._tell_started()
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with anyio.move_on_after(2):
            while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                await anyio.sleep(0.002)  # uvicorn has no event to wait for
        for task in self.server_state.tasks:
            task.cancel()


class _LoopThread:
    """Runs the engine, the keeper and uvicorn on an event loop of their own."""

    def __init__(
        self,
        app: ASGIApp,
        gateway: Gateway,
        engine: ScriptedEngine,
        served: Engine,
        protocol: type[HttpProtocol],
    ) -> None:
        self._app = app
        self._protocol = protocol
        self._gateway = gateway
        self._engine = engine
        self._served = served
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server under test", daemon=True)
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._uvicorn: _Uvicorn | None = None
        self._socket: socket.socket | None = None
        self.num_left_in_engine = 0

    def start(self, send_buffer: int | None) -> int:
        """Start and wait until connections are accepted; the port."""
        self._socket = socket.create_server((HOST, 0), backlog=1024)
        if send_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = int(self._socket.getsockname()[1])
        self._thread.start()
        assert self._started.wait(10), "the server did not start"
        self._raise_failure()
        return port

    def stop(self) -> None:
        if self._uvicorn is not None and self._thread.is_alive():
            self.call(self._end)
        self._thread.join(10)
        if self._socket is not None:
            self._socket.close()
        assert not self._thread.is_alive(), "the server did not stop"
        self._raise_failure()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        assert self._portal is not None
        return self._portal.call(function, *args)

    @property
    def uvicorn(self) -> _Uvicorn:
        assert self._uvicorn is not None
        return self._uvicorn

    def _end(self) -> None:
        self._gateway.admission.closed = True
        self._gateway.end_all(ShuttingDown("The server is shutting down."))
        self.uvicorn.stop.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend_options={"use_uvloop": True})
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        config = uvicorn.Config(
            self._app,
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        async with anyio.from_thread.BlockingPortal() as self._portal, self._served:
            await self._served.wait_ready()
            async with self._gateway.keeper, self._gateway.workflows:
                self._uvicorn = _Uvicorn(config, self._started.set)
                await self._uvicorn.serve(sockets=[self._socket])
            stats = self._engine.stats
            self.num_left_in_engine = stats.running + stats.waiting
