"""`POST /v1/completions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Send

from server.endpoints.base import JsonEndpoint
from server.endpoints.choices import Choices, formatter_for, respond, sampling_for
from server.endpoints.streaming import ChunkWriter, usage_bytes
from server.gateway import unix_s
from server.generation_run import GenerationRun, usage
from server.protocol.completions import MAX_CHOICES, CompletionRequest
from server.record import RequestRecord
from server.sampling import check_stream_options, structured_output
from server.sse import DONE, frame
from server.text.assembler import ChoiceAssembler, Piece, TokenEntry
from server.text.detokenizer import Detokenizer
from server.text.logprobs import LogprobFormatter
from server.text.prompting import check_prompt, encode_prompt
from server.text.tokenizer import ChatTokenizer
from spot.errors import InvalidRequest, NotSupported
from spot.generation import Generation, TokenLogprobs

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class Prompt:
    """One prompt of the request. `text` is what `echo` shows."""

    token_ids: list[int]
    text: str
    param: str


@dataclass(slots=True)
class CompletionJob:
    """A validated request, ready to run. Choice `i` belongs to prompt `i // n`."""

    id: str
    created: int
    model: str
    body: CompletionRequest
    prompts: list[Prompt]
    n: int
    generations: list[Generation]
    assemblers: list[ChoiceAssembler]
    formatter: LogprobFormatter | None
    fingerprint: str
    tokenizer: ChatTokenizer
    drops_output: bool

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def echoed_entries(
        self, index: int, logprobs: list[TokenLogprobs | None] | None
    ) -> list[TokenEntry | tuple[int, str]]:
        """The prompt's tokens as log probability entries, the first without a figure."""
        prompt = self.prompt_of(index)
        detokenizer = Detokenizer(self.tokenizer, None, skip_special_tokens=False)
        entries: list[TokenEntry | tuple[int, str]] = []
        for position, token_id in enumerate(prompt.token_ids):
            text = detokenizer.push(token_id)
            figures = logprobs[position] if logprobs and position < len(logprobs) else None
            if figures is None:
                entries.append((token_id, text))
            else:
                entries.append(TokenEntry(token_id, text, figures))
        return entries


class Completions(JsonEndpoint[CompletionRequest]):
    """Validates, encodes, generates, answers."""

    body_type = CompletionRequest
    journal_name = "completions"

    async def answer(
        self, body: CompletionRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        job = await self.prepare(body, record)
        await respond(
            self.gateway,
            body,
            job,
            record,
            send,
            prompts=[prompt.token_ids for prompt in job.prompts],
            new_writer=lambda: CompletionChunkWriter(job, record),
            whole_answer=lambda run: self._whole_answer(job, run, record),
        )

    async def prepare(self, body: CompletionRequest, record: RequestRecord) -> CompletionJob:
        """From a valid body to generations. Raises InvalidRequest, ModelNotFound, NotSupported."""
        model = self.gateway.model
        name = record.model = model.check_name(body.model)
        _check_combinations(body)
        prompts = await self._prompts(body)
        if record.journaling is not None:
            for position, prompt in enumerate(prompts):
                prompt.token_ids = record.journaling.prompt(position, prompt.token_ids)
        constraint = structured_output(body)
        choices = Choices(self.gateway, record, body)
        for prompt in prompts:
            sampling = sampling_for(
                model,
                body,
                num_prompt_tokens=len(prompt.token_ids),
                prompt_param=prompt.param,
                max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
                limit_param="max_tokens",
                default_max_tokens=None,
                num_logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
                constraint=constraint,
            )
            choices.add(prompt.token_ids, sampling)
        return CompletionJob(
            id=f"cmpl-{body.request_id or choices.key}",
            created=unix_s(),
            model=name,
            body=body,
            prompts=prompts,
            n=choices.n,
            generations=choices.generations,
            assemblers=choices.assemblers,
            formatter=formatter_for(model, body, body.logprobs),
            fingerprint=self.gateway.fingerprint,
            tokenizer=model.tokenizer,
            drops_output=body.max_tokens == 0,
        )

    async def _prompts(self, body: CompletionRequest) -> list[Prompt]:
        given = body.prompt
        if isinstance(given, str):
            return [await self._prompt(body, given, "prompt")]
        if isinstance(given[0], int):
            return [await self._prompt(body, given, "prompt")]
        return [
            await self._prompt(body, item, f"prompt.{position}")
            for position, item in enumerate(given)
        ]

    async def _prompt(self, body: CompletionRequest, given: Any, param: str) -> Prompt:
        model = self.gateway.model
        if isinstance(given, str):
            if not given:
                raise InvalidRequest("The prompt must not be empty.", param=param)
            ids = await encode_prompt(
                model,
                given,
                add_special_tokens=body.add_special_tokens is not False,
                truncation=body.prompt_truncation,
                param=param,
            )
            return Prompt(ids, given, param)
        bad = [token_id for token_id in given if token_id >= model.vocab_size]
        if bad:
            raise InvalidRequest(
                f"Token ids {bad[:10]} are out of vocabulary: they must be below "
                f"{model.vocab_size}.",
                param=param,
            )
        ids = check_prompt(model, given, truncation=body.prompt_truncation, param=param)
        return Prompt(ids, model.tokenizer.decode(ids) if body.echo else "", param)

    async def _whole_answer(
        self, job: CompletionJob, run: GenerationRun, record: RequestRecord
    ) -> dict[str, Any]:
        choices = [_WholeChoice(job, index) for index in range(len(job.generations))]
        while not run.is_done:
            for index, piece in await run.pieces():
                choices[index].add(piece)
        if job.drops_output:
            record.num_output_tokens = 0
        answer = job.head()
        answer["choices"] = [choice.render(run) for choice in choices]
        record.finish_reasons = [item["finish_reason"] for item in answer["choices"]]
        answer["usage"] = usage(record)
        return answer


def _check_combinations(body: CompletionRequest) -> None:
    if body.suffix:
        raise NotSupported("suffix is not supported by this model.", param="suffix")
    check_stream_options(body)
    if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
        num_choices = len(body.prompt) * (body.n or 1)
        if num_choices > MAX_CHOICES:
            raise InvalidRequest(
                f"Prompts times n must be at most {MAX_CHOICES}, not {num_choices}.", param="n"
            )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not available with stream=true.", param="prompt_logprobs"
        )


class _WholeChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self, job: CompletionJob, index: int) -> None:
        self._job = job
        self._index = index
        self._text: list[str] = []
        self._entries: list[TokenEntry] = []
        self._token_ids: list[int] = []
        self._finish = ""
        self._stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self._text.append(piece.content)
        self._entries += piece.entries or []
        self._token_ids += piece.token_ids
        if piece.finish_reason is not None:
            self._finish, self._stop_reason = piece.finish_reason, piece.stop_reason

    def render(self, run: GenerationRun) -> dict[str, Any]:
        job = self._job
        prompt = job.prompt_of(self._index)
        text = "" if job.drops_output else "".join(self._text)
        entries: list[TokenEntry | tuple[int, str]] = []
        prompt_logprobs = run.prompt_logprobs.get(self._index)
        if job.body.echo:
            text = prompt.text + text
            entries += job.echoed_entries(self._index, prompt_logprobs)
        if not job.drops_output:
            entries += self._entries
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if job.drops_output else self._finish,
            "stop_reason": None if job.drops_output else self._stop_reason,
        }
        if job.formatter is not None and job.body.logprobs is not None:
            choice["logprobs"] = job.formatter.completion(entries, offset=0)[0]
        if job.formatter and prompt_logprobs and job.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = job.formatter.prompt(prompt_logprobs)
        if job.body.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
            choice["token_ids"] = [] if job.drops_output else self._token_ids
        return choice


@dataclass(slots=True)
class _Progress:
    """What a streamed choice has shown: its text offset and whether the prompt was echoed."""

    offset: int = 0
    started: bool = False


class CompletionChunkWriter(ChunkWriter):
    """Renders pieces as `text_completion` chunks."""

    def __init__(self, job: CompletionJob, record: RequestRecord) -> None:
        self._job = job
        self._record = record
        head = orjson.dumps(job.head())[:-1] + b',"choices":['
        self._head = b"data: " + head
        self._continuous = job.body.wants_continuous_usage
        self._null_usage = b',"usage":null' if job.body.wants_usage else b""
        self._progress = [_Progress() for _ in job.generations]
        body = job.body
        self._plain = job.formatter is None and not body.return_token_ids and not body.echo

    def _end(self) -> bytes:
        if self._continuous:
            return b'],"usage":' + usage_bytes(self._record) + b"}\n\n"
        return b"]" + self._null_usage + b"}\n\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._end()

    def opening(self) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        if self._plain and piece.finish_reason is None:
            if not piece.content:
                return b""
            return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (
                self._head,
                index,
                orjson.dumps(piece.content),
                self._end(),
            )
        if self._job.drops_output:
            self._record.num_output_tokens = 0
        choice = self._choice(index, piece, run)
        if piece.finish_reason is not None:
            self._record.finish_reasons.append(choice["finish_reason"])
        elif not (choice["text"] or choice["logprobs"] or choice.get("token_ids")):
            return b""
        return self._chunk(choice)

    def _choice(self, index: int, piece: Piece, run: GenerationRun) -> dict[str, Any]:
        job, progress = self._job, self._progress[index]
        drops = job.drops_output
        text = "" if drops else piece.content
        entries: list[TokenEntry | tuple[int, str]] = []
        first = not progress.started
        progress.started = True
        if first and job.body.echo:
            text = job.prompt_of(index).text + text
            entries += job.echoed_entries(index, run.prompt_logprobs.get(index))
        if not drops:
            entries += piece.entries or []
        finish = piece.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if drops and finish else finish,
        }
        if finish is not None:
            choice["stop_reason"] = None if drops else piece.stop_reason
        if job.formatter is not None and job.body.logprobs is not None and entries:
            choice["logprobs"], progress.offset = job.formatter.completion(
                entries, offset=progress.offset
            )
        if job.body.return_token_ids:
            if first:
                choice["prompt_token_ids"] = job.prompt_of(index).token_ids
            choice["token_ids"] = [] if drops else piece.token_ids
        return choice

    def closing(self) -> bytes:
        if not self._job.body.wants_usage:
            return DONE
        chunk = self._job.head()
        chunk["choices"] = []
        chunk["usage"] = usage(self._record)
        chunk["shuntyard"] = {"migrations": self._record.num_migrations}
        return frame(orjson.dumps(chunk)) + DONE
