"""What an upstream is and can do, found out by asking it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp
import anyio
import msgspec

from spot.engines.base import EngineCard
from spot.engines.upstream_answers import AnswerReader
from spot.engines.upstream_config import UpstreamConfig
from spot.engines.upstream_http import NoAnswer, exchange, get
from spot.engines.upstream_protocol import Endpoint, build_request
from spot.errors import EngineFailed, EngineUnavailable, InvalidRequest
from spot.generation import Generation, SamplingParams, TokenDelta

_DEFAULT_MAX_LOGPROBS = 20
_UNKNOWN_VOCAB_SIZE = 1_000_000
_BEYOND_ANY_LIMIT = 2**31 - 1
_UNKNOWN_VERSION = "of unknown version"
# vLLM's words and Shuntyard's.
_MAX_LOGPROBS = re.compile(r"(?:greater than max allowed:|less than or equal to) (\d+)")
_VOCAB_SIZE = re.compile(r"Vocabulary size: (\d+)")
_LAST_TOKEN_ID = re.compile(r"token ids from 0 to (\d+)")


class Unsuitable(Exception):
    """The upstream answers, but cannot serve as an engine. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What was found. version: as it calls itself."""

    model: str
    card: EngineCard
    version: str
    is_shuntyard: bool
    has_generate: bool

    @property
    def guarantees(self) -> str:
        """What holds for generations here, in words."""
        name = "Shuntyard" if self.is_shuntyard else "vLLM"
        through = "/inference/v1/generate" if self.has_generate else "/v1/completions"
        return (
            f"{name} {self.version}, model {self.model}, token ids through {through}; "
            "goes on with interrupted generations by taking their output for prompt: not with "
            "seeded or constrained ones, penalties on output, bad words, thinking budgets or "
            "extra arguments"
        )


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = ""
    instance: str = ""
    upstreams: list[str] = []


async def probe(session: aiohttp.ClientSession, config: UpstreamConfig) -> Upstream:
    """Ask for all there is to know; costs the upstream about two tokens.

    Raises NoAnswer while it cannot be asked, and Unsuitable.
    """
    version = await _version(session, config)
    if version.instance and version.instance == config.own_instance:
        raise Unsuitable("the upstream is this very server")
    if config.own_instance in version.upstreams:
        raise Unsuitable(
            "the upstream passes requests on to this very server: of two servers only one can be "
            "the other's upstream"
        )
    model = await _model(session, config)
    if model.max_model_len is None:
        raise Unsuitable(f"the upstream does not tell max_model_len of its model {model.id}")
    ask = _Asker(session, config, model.id)
    await _check_token_ids(ask)
    vocab_size = config.vocab_size or await _vocab_size(ask)
    max_logprobs = await _max_logprobs(ask)
    is_shuntyard = model.owned_by == "shuntyard"
    name = version.version[:40] or _UNKNOWN_VERSION
    card = EngineCard(
        max_model_len=model.max_model_len,
        vocab_size=vocab_size,
        engine=f"{'shuntyard' if is_shuntyard else 'vllm'} {name} (upstream)",
        max_num_seqs=config.max_num_seqs,
        max_logprobs=max_logprobs,
        resume="prompt",
        instances=[version.instance, *version.upstreams] if version.instance else [],
    )
    return Upstream(model.id, card, name, is_shuntyard, await _has_generate(ask))


async def _model(session: aiohttp.ClientSession, config: UpstreamConfig) -> _Model:
    """The model of the config, or the only one; other names and adapters of it do not count."""
    try:
        body = await get(session, config, "/v1/models", timeout_s=config.health_timeout_s)
        models = msgspec.json.decode(body, type=_Models).data
    except NoAnswer as error:
        if error.status in (401, 403, 404):
            raise Unsuitable(f"{error.message}: wrong URL or API key?") from error
        raise
    except msgspec.DecodeError as error:
        raise Unsuitable(f"/v1/models is not OpenAI's: {error}") from error
    names = ", ".join(model.id for model in models) or "none"
    if config.model is not None:
        for model in models:
            if model.id == config.model:
                return model
        raise Unsuitable(f"the upstream has no model {config.model}; it has: {names}")
    bases = [model for model in models if model.parent is None]
    if not bases or len({model.root or model.id for model in bases}) > 1:
        raise Unsuitable(f"name one of the upstream's models; it has: {names}")
    return bases[0]


async def _version(session: aiohttp.ClientSession, config: UpstreamConfig) -> _Version:
    try:
        body = await get(session, config, "/version", timeout_s=config.health_timeout_s)
        return msgspec.json.decode(body, type=_Version)
    except (NoAnswer, msgspec.DecodeError):
        return _Version()


class _Asker:
    """Generates one token, with these parameters through this endpoint."""

    def __init__(self, session: aiohttp.ClientSession, config: UpstreamConfig, model: str) -> None:
        self._session = session
        self._config = config
        self._model = model

    async def __call__(self, sampling: SamplingParams, endpoint: Endpoint) -> list[TokenDelta]:
        """Raises InvalidRequest, EngineUnavailable, EngineFailed."""
        generation = Generation("probe", [0], sampling)
        request = build_request(generation, endpoint, model=self._model)
        reader = AnswerReader(generation, endpoint)
        deltas: list[TokenDelta] = []
        try:
            with anyio.fail_after(self._config.response_timeout_s):
                await exchange(self._session, self._config, request, reader, deltas.append)
        except TimeoutError as error:
            raise EngineFailed("the upstream did not answer in time") from error
        return deltas


async def _check_token_ids(ask: _Asker) -> None:
    try:
        await ask(_sampling(), "completions")
    except InvalidRequest as error:
        raise Unsuitable(f"the upstream refuses a prompt of token ids: {error.message}") from error
    except EngineUnavailable as error:
        raise NoAnswer(error.message) from error
    except EngineFailed as error:
        if "no token ids" in error.message:
            raise Unsuitable("the upstream sends no token ids: too old a vLLM?") from error
        raise NoAnswer(error.message) from error


async def _has_generate(ask: _Asker) -> bool:
    """vLLM has the path always, but refuses it without --enable-scale-out."""
    try:
        await ask(_sampling(), "generate")
    except (InvalidRequest, EngineUnavailable, EngineFailed):
        return False
    return True


async def _vocab_size(ask: _Asker) -> int:
    """From the upstream's words about a token far outside; a million if it has none."""
    refusal = await _refusal(ask, _sampling(logit_bias={_BEYOND_ANY_LIMIT: 0.0}))
    if found := _VOCAB_SIZE.search(refusal):
        return int(found[1])
    if found := _LAST_TOKEN_ID.search(refusal):
        return int(found[1]) + 1
    return _UNKNOWN_VOCAB_SIZE


async def _max_logprobs(ask: _Asker) -> int:
    """From the upstream's words about far too many; vLLM's default if it has none."""
    refusal = await _refusal(ask, _sampling(logprobs=_BEYOND_ANY_LIMIT))
    found = _MAX_LOGPROBS.search(refusal)
    return int(found[1]) if found else _DEFAULT_MAX_LOGPROBS


async def _refusal(ask: _Asker, sampling: SamplingParams) -> str:
    """What the upstream says of parameters that it cannot serve."""
    try:
        await ask(sampling, "completions")
    except (InvalidRequest, EngineUnavailable, EngineFailed) as error:
        return error.message
    return ""


def _sampling(
    *, logprobs: int | None = None, logit_bias: dict[int, float] | None = None
) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, logprobs=logprobs, logit_bias=logit_bias)
