"""`/tokenize` and `/detokenize`, in the shapes of vLLM."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from gateway import wire_format
from gateway.catalogue import Pool
from gateway.docs import body_docs
from gateway.prompts import PromptEncoder
from gateway.schemas import DetokenizeRequest, TokenizeRequest, refuse
from gateway.services import body_of, caller_of, services_of
from shared.errors import InvalidRequestError

router = APIRouter(tags=["tokens"])

_JSON = "application/json"
#: Fields of vLLM's that are not served here, with the values that ask for nothing.
_REFUSED = {
    name: lambda value: value is None or value == []
    for name in ("chat_template", "tools", "mm_processor_kwargs", "media_io_kwargs")
}


class _Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


@router.post("/tokenize", openapi_extra=body_docs(TokenizeRequest), response_model=None)
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of a conversation as the model's chat template renders it."""
    body = await body_of(request, TokenizeRequest)
    refuse(body, _REFUSED)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: either prompt or messages is needed, and not both", param="prompt")
    pool = await _pool(request, body.model)

    def encoded() -> bytes:
        ids = _encode(pool.encoder, body)
        texts = pool.encoder.tokens(ids) if body.return_token_strs else None
        return wire_format.encode(_Tokens(len(ids), pool.card.max_model_len, ids, texts))

    return Response(await services_of(request).in_thread(encoded), media_type=_JSON)


@router.post("/detokenize", openapi_extra=body_docs(DetokenizeRequest), response_model=None)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special ones included."""
    body = await body_of(request, DetokenizeRequest)
    pool = await _pool(request, body.model)

    def decoded() -> bytes:
        return wire_format.encode({"prompt": pool.encoder.decode(pool.encoder.checked(body.tokens, "tokens"))})

    return Response(await services_of(request).in_thread(decoded), media_type=_JSON)


def _encode(encoder: PromptEncoder, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        return encoder.text(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    if not body.messages:
        raise InvalidRequestError("messages: must not be empty", param="messages")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message: cannot go with add_generation_prompt", param="continue_final_message"
        )
    return encoder.chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )


async def _pool(request: Request, model: str | None) -> Pool:
    """The pool of a model; without a name the only one that there is."""
    services, tenant = services_of(request), caller_of(request).tenant
    if model is not None:
        return await services.pool_of(model, tenant)
    await services.catalogue.refresh_if_empty()
    pools = services.catalogue.pools
    if len(pools) != 1:
        raise InvalidRequestError("model: this field is required, there is not exactly one model", param="model")
    return await services.pool_of(pools[0].card.pool, tenant)
