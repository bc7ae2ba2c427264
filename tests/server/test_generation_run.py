"""A run: its accounting, and what it leaves behind."""

from __future__ import annotations

import pytest

from server.gateway import Admission, Gateway, ServedModel
from server.generation_run import GenerationRun, usage
from server.metrics import Metrics
from server.record import RequestRecord
from server.sse import StreamKeeper
from server.text.assembler import ChoiceAssembler
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import ChatTokenizer
from spot.errors import EngineUnavailable, InvalidRequest, Overloaded, ShuntyardError
from spot.generation import Generation, SamplingParams
from tests.fakes import HandEngine

pytestmark = pytest.mark.anyio


def gateway_of(tokenizer: ChatTokenizer, engine: HandEngine, *, max_queue: int = 9) -> Gateway:
    return Gateway(
        model=ServedModel(["demo"], tokenizer, engine),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=9, max_queue=max_queue),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
    )


def run_of(
    gateway: Gateway,
    count: int,
    record: RequestRecord,
    *,
    num_choices: int = 1,
    stop: str = "",
    constraint_param: str | None = None,
) -> GenerationRun:
    tokenizer = gateway.model.tokenizer
    return GenerationRun(
        gateway,
        record,
        [Generation(f"g-{i}", [1, 2], SamplingParams(max_tokens=99)) for i in range(count)],
        [
            ChoiceAssembler(Detokenizer(tokenizer, [1, 2]), stops=[stop] if stop else [])
            for _ in range(count)
        ],
        num_prompt_tokens=2,
        num_choices=num_choices,
        constraint_param=constraint_param,
    )


@pytest.fixture
def record() -> RequestRecord:
    return RequestRecord("r", "POST", "/", 0.0)


@pytest.fixture
def engine() -> HandEngine:
    return HandEngine()


async def test_tokens_are_counted_once_and_the_prompt_once(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord
) -> None:
    gateway = gateway_of(tokenizer, engine)
    with run_of(gateway, 2, record, num_choices=2) as run:
        assert gateway.live == {run}
        engine.push(0, 500, num_cached_tokens=1)
        engine.push(1, 500, 600, finish="length", num_cached_tokens=2)
        await run.pieces()
        engine.push(0, 700, finish="length")
        await run.pieces()
        assert run.is_done
    assert usage(record) == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert gateway.live == set()
    assert gateway.admission.num_generations == 0


async def test_a_stop_string_ends_the_generation_in_the_engine(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord
) -> None:
    gateway = gateway_of(tokenizer, engine)
    with run_of(gateway, 1, record, stop="END") as run:
        ids = tokenizer.encode("a END b")
        engine.push(0, *ids)
        ((_, piece),) = await run.pieces()
        assert (piece.content, piece.stop_reason) == ("a ", "END")
        assert engine.aborted == ["g-0"]
        assert run.is_done
        assert record.num_output_tokens < len(ids)


async def test_an_engine_that_refuses_leaves_nothing(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord
) -> None:
    gateway = gateway_of(tokenizer, engine)
    engine.refuse_after = 1
    with pytest.raises(EngineUnavailable), run_of(gateway, 2, record):
        raise AssertionError("not entered")
    assert gateway.admission.num_generations == 0
    assert gateway.live == set()
    assert record.submitted_s is None
    assert "g-0" in engine.aborted


async def test_a_full_queue_refuses_before_the_engine_hears_of_it(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord
) -> None:
    gateway = gateway_of(tokenizer, engine, max_queue=1)
    with run_of(gateway, 9, record):
        with pytest.raises(Overloaded), run_of(gateway, 1, record):
            raise AssertionError("not entered")
        assert len(engine.generations) == 9
        assert gateway.admission.num_generations == 9


async def test_end_all_ends_every_run(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord
) -> None:
    gateway = gateway_of(tokenizer, engine)
    with run_of(gateway, 1, record) as run:
        gateway.end_all(ShuntyardError("over"))
        with pytest.raises(ShuntyardError, match="over"):
            await run.pieces()
    assert engine.aborted == ["g-0"]


async def test_times_are_noted(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord
) -> None:
    gateway = gateway_of(tokenizer, engine)
    with run_of(gateway, 1, record) as run:
        run.poke()
        assert await run.pieces() == []
        assert record.first_token_s is None
        engine.push(0, 500)
        await run.pieces()
        assert record.first_token_s == record.last_token_s is not None
        engine.push(0, 600, finish="length")
        await run.pieces()
    assert record.tpot_s is not None
    assert record.tpot_s >= 0


@pytest.mark.parametrize(("param", "named"), [("structured", "response_format"), ("seed", "seed")])
async def test_a_refused_constraint_is_named_as_the_request_names_it(
    tokenizer: ChatTokenizer, engine: HandEngine, record: RequestRecord, param: str, named: str
) -> None:
    gateway = gateway_of(tokenizer, engine)
    with run_of(gateway, 1, record, constraint_param="response_format") as run:
        engine.fail(0, InvalidRequest("no such type", param=param))
        with pytest.raises(InvalidRequest) as caught:
            await run.pieces()
    assert caught.value.param == named
