"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from starlette.types import Send

from server.asgi import send_json
from server.endpoints.base import JsonEndpoint
from server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from server.record import RequestRecord
from server.text.conversation import template_messages, template_tools
from server.text.prompting import decode_ids, encode_text
from spot.errors import InvalidRequest


class Tokenize(JsonEndpoint[TokenizeRequest]):
    """Text or a conversation to token ids; not limited by the context length."""

    body_type = TokenizeRequest

    async def answer(
        self, body: TokenizeRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        model = self.gateway.model
        record.model = model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        tokenizer = model.tokenizer
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await encode_text(tokenizer, body.prompt, add_special_tokens=special)
        else:
            text = self._render(body)
            special = bool(body.add_special_tokens)
            ids = await encode_text(tokenizer, text, add_special_tokens=special)
        strings = [tokenizer.token_name(i) for i in ids] if body.return_token_strs else None
        await send_json(
            send,
            {
                "count": len(ids),
                "max_model_len": model.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            },
        )

    def _render(self, body: TokenizeRequest) -> str:
        model = self.gateway.model
        if body.chat_template is not None and not model.chat.trust_request_chat_template:
            raise InvalidRequest(
                "A chat template of the request is only used by a server started with "
                "--trust-request-chat-template.",
                param="chat_template",
            )
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        generates = body.add_generation_prompt
        return model.tokenizer.render_chat(
            template_messages(
                body.messages or [], knows_developer=model.tokenizer.knows_role("developer")
            ),
            tools=template_tools(body.tools),
            add_generation_prompt=(not continues) if generates is None else generates,
            continue_final_message=continues,
            chat_template=body.chat_template,
            template_kwargs={
                **model.chat.default_template_kwargs,
                **(body.chat_template_kwargs or {}),
            },
        )


class Detokenize(JsonEndpoint[DetokenizeRequest]):
    """Token ids to text."""

    body_type = DetokenizeRequest

    async def answer(
        self, body: DetokenizeRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        model = self.gateway.model
        record.model = model.check_name(body.model)
        bad = [token_id for token_id in body.tokens if token_id >= model.vocab_size]
        if bad:
            raise InvalidRequest(
                f"Token ids must be below {model.vocab_size}; not {bad[:10]}.", param="tokens"
            )
        text = await decode_ids(model.tokenizer, body.tokens)
        await send_json(send, {"prompt": text})
