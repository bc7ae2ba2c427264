"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Send

from server.endpoints.base import JsonEndpoint
from server.endpoints.choices import Choices, formatter_for, respond, sampling_for
from server.endpoints.streaming import ChunkWriter, usage_bytes
from server.endpoints.tool_plan import ToolPlan, plan_tools
from server.endpoints.workflow_chat import PREFIX, WorkflowChat
from server.gateway import Gateway, unix_s
from server.generation_run import GenerationRun, usage
from server.protocol.base import parse_body
from server.protocol.chat import ChatCompletionRequest
from server.record import RequestRecord
from server.sampling import check_stream_options, constrained_by_extension, structured_output
from server.sse import DONE, frame
from server.text.assembler import ChoiceAssembler, Piece
from server.text.conversation import template_messages, template_tools
from server.text.logprobs import LogprobFormatter
from server.text.prompting import encode_prompt
from spot.errors import InvalidRequest
from spot.generation import Generation, StructuredOutput
from spot.parsed import ToolCallDelta

# A character of private use, where a message is cut.
_CUT = "\ue000"


@dataclass(slots=True)
class ChatJob:
    """A validated chat request, ready to run."""

    id: str
    created: int
    model: str
    body: ChatCompletionRequest
    tools: ToolPlan
    prompt_token_ids: list[int]
    generations: list[Generation]
    assemblers: list[ChoiceAssembler]
    formatter: LogprobFormatter | None
    role: str
    echo: str
    fingerprint: str
    emit_reasoning_content: bool

    def finish_reason(self, index: int, reason: str) -> str:
        """OpenAI's matrix: a call ends as `tool_calls`, a named one as `stop`, `length` stays."""
        called = self.assemblers[index].called_tools
        if reason == "stop" and called and self.tools.mode in ("auto", "required"):
            return "tool_calls"
        return reason

    def head(self, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        if self.body.service_tier is not None:
            head["service_tier"] = "default"
        return head


class ChatCompletions(JsonEndpoint[ChatCompletionRequest]):
    """Validates, renders, generates, answers."""

    body_type = ChatCompletionRequest
    journal_name = "chat"

    def __init__(self, gateway: Gateway, workflows: WorkflowChat | None = None) -> None:
        """workflows: answers where the model is a workflow."""
        super().__init__(gateway)
        self._workflows = workflows

    async def answer(
        self,
        body: ChatCompletionRequest,
        raw: dict[str, Any],
        record: RequestRecord,
        send: Send,
    ) -> None:
        if self._workflows is not None and (body.model or "").startswith(PREFIX):
            await self._workflows.answer(body, raw, record, send)
            return
        job = await self.prepare(body, raw, record)
        await respond(
            self.gateway,
            body,
            job,
            record,
            send,
            prompts=[job.prompt_token_ids],
            new_writer=lambda: ChatChunkWriter(job, record),
            whole_answer=lambda run: self._whole_answer(job, run, record),
        )

    async def prepare(
        self, body: ChatCompletionRequest, raw: dict[str, Any], record: RequestRecord
    ) -> ChatJob:
        """From a valid body to generations. Raises InvalidRequest, ModelNotFound."""
        model = self.gateway.model
        name = record.model = model.check_name(body.model)
        self._check_combinations(body)
        tools = plan_tools(body, self.gateway)
        body, raw = self._adjusted(body, raw, tools)
        constraint = _constraint(body, tools)
        prompt_ids = await self._prompt(body, tools)
        if record.journaling is not None:
            prompt_ids = record.journaling.prompt(0, prompt_ids)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        has_new_limit = body.max_completion_tokens is not None
        sampling = sampling_for(
            model,
            body,
            num_prompt_tokens=len(prompt_ids),
            prompt_param="messages",
            max_tokens=body.max_completion_tokens if has_new_limit else body.max_tokens,
            limit_param="max_completion_tokens" if has_new_limit else "max_tokens",
            default_max_tokens=model.defaults.max_new_tokens,
            num_logprobs=num_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            constraint=constraint,
        )
        parsers = model.chat.parsers
        choices = Choices(self.gateway, record, body)
        choices.add(
            prompt_ids,
            sampling,
            reasoning_ended=(
                parsers.reasoning_ended(raw, prompt_ids) if parsers and constraint else None
            ),
            new_parser=lambda: tools.parser(parsers, raw, prompt_ids),
            hide_reasoning=not body.include_reasoning,
        )
        return ChatJob(
            id=f"chatcmpl-{body.request_id or choices.key}",
            created=unix_s(),
            model=name,
            body=body,
            tools=tools,
            prompt_token_ids=prompt_ids,
            generations=choices.generations,
            assemblers=choices.assemblers,
            formatter=formatter_for(model, body, num_logprobs),
            role=model.chat.response_role,
            echo=_echo(body, model.chat.response_role),
            fingerprint=self.gateway.fingerprint,
            emit_reasoning_content=model.chat.emit_reasoning_content,
        )

    def _adjusted(
        self, body: ChatCompletionRequest, raw: dict[str, Any], tools: ToolPlan
    ) -> tuple[ChatCompletionRequest, dict[str, Any]]:
        """The request as the model's parsers want it.

        Tool calls that are required or named are ours to parse: the parsers do not see the tools.
        """
        parsers = self.gateway.model.chat.parsers
        if parsers is None:
            return body, raw
        seen = raw
        if tools.mode in ("named", "required"):
            seen = {**raw, "tools": None, "tool_choice": None}
        changes = parsers.adjust(seen)
        if changes:
            body = parse_body(ChatCompletionRequest, {**raw, **changes})
        return body, seen

    def _check_combinations(self, body: ChatCompletionRequest) -> None:
        check_stream_options(body)
        if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
            raise InvalidRequest(
                "top_logprobs is only allowed with logprobs=true.", param="top_logprobs"
            )
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is not available with stream=true.", param="prompt_logprobs"
            )
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        if (
            body.chat_template is not None
            and not self.gateway.model.chat.trust_request_chat_template
        ):
            raise InvalidRequest(
                "A chat template of the request is only used by a server started with "
                "--trust-request-chat-template.",
                param="chat_template",
            )

    async def beginning(self, body: ChatCompletionRequest, raw: dict[str, Any]) -> list[int]:
        """Token ids of how prompts begin whose messages begin so; the last message may be cut.

        Empty where the template shows nothing of it. Raises InvalidRequest.
        """
        tools = plan_tools(body, self.gateway)
        body, _ = self._adjusted(body, raw, tools)
        *others, last = body.messages
        cut = last.model_copy(update={"content": f"{last.content}{_CUT}"})
        update = {"messages": [*others, cut], "add_generation_prompt": False}
        text = self._text(body.model_copy(update=update), tools)
        beginning, mark, _ = text.partition(_CUT)
        return await self._encoded(body, beginning) if mark else []

    async def _prompt(self, body: ChatCompletionRequest, tools: ToolPlan) -> list[int]:
        return await self._encoded(body, self._text(body, tools))

    async def _encoded(self, body: ChatCompletionRequest, text: str) -> list[int]:
        return await encode_prompt(
            self.gateway.model,
            text,
            add_special_tokens=bool(body.add_special_tokens),
            truncation=body.prompt_truncation,
            param="messages",
        )

    def _text(self, body: ChatCompletionRequest, tools: ToolPlan) -> str:
        model = self.gateway.model
        offered = body.tools
        if tools.mode == "none" and model.chat.exclude_tools_when_none:
            offered = None
        kwargs = {**model.chat.default_template_kwargs, **(body.chat_template_kwargs or {})}
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        continues = bool(body.continue_final_message)
        generates = body.add_generation_prompt
        return model.tokenizer.render_chat(
            template_messages(
                body.messages, knows_developer=model.tokenizer.knows_role("developer")
            ),
            tools=template_tools(offered),
            documents=body.documents,
            add_generation_prompt=(not continues) if generates is None else generates,
            continue_final_message=continues,
            chat_template=body.chat_template,
            template_kwargs=kwargs,
        )

    async def _whole_answer(
        self, job: ChatJob, run: GenerationRun, record: RequestRecord
    ) -> dict[str, Any]:
        choices = [WholeChoice(job, index) for index in range(len(job.generations))]
        while not run.is_done:
            for index, piece in await run.pieces():
                choices[index].add(piece)
        answer = job.head("chat.completion")
        answer["choices"] = [choice.render() for choice in choices]
        record.finish_reasons = [item["finish_reason"] for item in answer["choices"]]
        answer["usage"] = usage(record)
        if job.formatter is not None and 0 in run.prompt_logprobs:
            answer["prompt_logprobs"] = job.formatter.prompt(run.prompt_logprobs[0])
        if job.body.return_token_ids:
            answer["prompt_token_ids"] = job.prompt_token_ids
        return answer


def _constraint(body: ChatCompletionRequest, tools: ToolPlan) -> StructuredOutput | None:
    """On the output: by the tools where a call is required, else by the request's own fields."""
    constraint = structured_output(body)
    if tools.mode not in ("named", "required"):
        return constraint
    if constraint is not None and constrained_by_extension(body):
        raise InvalidRequest(
            "A tool call that is required cannot be combined with structured_outputs.",
            param="structured_outputs",
        )
    # response_format is about content, of which there is none beside a required call.
    return tools.constraint


def _echo(body: ChatCompletionRequest, role: str) -> str:
    """What the answer begins with: the last message, if that is asked for and of its role."""
    if not body.echo or body.messages[-1].role != role:
        return ""
    content: str = template_messages(body.messages, knows_developer=True)[-1]["content"]
    return content


class WholeChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self, job: ChatJob, index: int) -> None:
        self._job = job
        self._index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCallDelta] = {}
        self._entries: list[Any] = []
        self._token_ids: list[int] = []
        self._finish = ""
        self._stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        for call in piece.tool_calls:
            whole = self._calls.setdefault(call.index, ToolCallDelta(call.index))
            whole.id = whole.id or call.id
            whole.name = whole.name or call.name
            whole.arguments += call.arguments
        self._entries += piece.entries or []
        self._token_ids += piece.shown_ids
        if piece.finish_reason is not None:
            self._finish, self._stop_reason = piece.finish_reason, piece.stop_reason

    def render(self) -> dict[str, Any]:
        job = self._job
        content: str | None = job.echo + "".join(self._content)
        reasoning = "".join(self._reasoning)
        message: dict[str, Any] = {"role": job.role, "content": content, "refusal": None}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [_whole_call(call) for call in self._calls.values()]
        if reasoning and job.body.include_reasoning:
            message["reasoning"] = reasoning
            if job.emit_reasoning_content:
                message["reasoning_content"] = reasoning
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": job.formatter.chat(self._entries)
            if job.formatter is not None and job.body.logprobs
            else None,
            "finish_reason": job.finish_reason(self._index, self._finish),
            "stop_reason": self._stop_reason,
        }
        if job.body.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice


def _whole_call(call: ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {}
    if call.name is not None:
        function["name"] = call.name
    function["arguments"] = call.arguments
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class ChatChunkWriter(ChunkWriter):
    """Renders pieces as `chat.completion.chunk`s.

    The common chunk (some content, nothing else) is put together from prepared bytes.
    """

    def __init__(self, job: ChatJob, record: RequestRecord) -> None:
        self._job = job
        self._record = record
        head = orjson.dumps(job.head("chat.completion.chunk"))[:-1] + b',"choices":['
        self._head = b"data: " + head
        self._continuous = job.body.wants_continuous_usage
        self._null_usage = b',"usage":null' if job.body.wants_usage else b""
        self._num_choices = len(job.generations)
        self._plain = job.formatter is None and not job.body.return_token_ids

    def _end(self) -> bytes:
        if self._continuous:
            return b'],"usage":' + usage_bytes(self._record) + b"}\n\n"
        return b"]" + self._null_usage + b"}\n\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._end()

    def _opening_end(self) -> bytes:
        """The opening is written when the first token is there, and says nothing of it."""
        if self._continuous:
            return b'],"usage":' + orjson.dumps(usage(self._record, num_output_tokens=0)) + b"}\n\n"
        return self._end()

    def opening(self) -> bytes:
        frames = []
        end = self._opening_end()
        for index in range(self._num_choices):
            delta = {"role": self._job.role, "content": self._job.echo}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if index == 0 and self._job.body.return_token_ids:
                extra = self._head[: -len(b',"choices":[')]
                ids = orjson.dumps(self._job.prompt_token_ids)
                frames.append(
                    extra
                    + b',"prompt_token_ids":'
                    + ids
                    + b',"choices":['
                    + orjson.dumps(choice)
                    + end
                )
            else:
                frames.append(self._head + orjson.dumps(choice) + end)
        return b"".join(frames)

    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        frames: list[bytes] = []
        if self._plain and not piece.reasoning and not piece.tool_calls:
            if piece.content:
                frames.append(
                    b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b'
                    % (self._head, index, orjson.dumps(piece.content), self._end())
                )
        else:
            frames += [self._chunk(choice) for choice in self._choices(index, piece)]
        if piece.finish_reason is not None:
            reason = self._job.finish_reason(index, piece.finish_reason)
            self._record.finish_reasons.append(reason)
            frames.append(
                self._chunk(
                    {
                        "index": index,
                        "delta": {},
                        "logprobs": None,
                        "finish_reason": reason,
                        "stop_reason": piece.stop_reason,
                    }
                )
            )
        return b"".join(frames)

    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Reasoning first, then content, then tool calls; logprobs and ids ride on the first."""
        job = self._job
        shows_reasoning = bool(piece.reasoning) and bool(job.body.include_reasoning)
        deltas: list[dict[str, Any]] = []
        if shows_reasoning:
            delta: dict[str, Any] = {"reasoning": piece.reasoning}
            if job.emit_reasoning_content:
                delta["reasoning_content"] = piece.reasoning
            deltas.append(delta)
        if piece.content:
            deltas.append({"content": piece.content})
        deltas += [{"tool_calls": [_call_delta(call)]} for call in piece.tool_calls]
        wants_entries = job.formatter is not None and piece.entries
        wants_ids = bool(job.body.return_token_ids) and bool(piece.shown_ids)
        if not deltas and (wants_entries or wants_ids):
            deltas.append({"content": ""} if job.tools.mode == "none" else {})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if choices and wants_entries and job.formatter is not None:
            choices[0]["logprobs"] = job.formatter.chat(piece.entries or [])
        if choices and wants_ids:
            choices[0]["token_ids"] = piece.shown_ids
        return choices

    def closing(self) -> bytes:
        if not self._job.body.wants_usage:
            return DONE
        chunk = self._job.head("chat.completion.chunk")
        chunk["choices"] = []
        chunk["usage"] = usage(self._record)
        chunk["shuntyard"] = {"migrations": self._record.num_migrations}
        return frame(orjson.dumps(chunk)) + DONE
