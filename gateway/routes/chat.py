"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.docs import body_docs
from gateway.errors import reference_of
from gateway.generation import GenerationResponse
from gateway.plain_route import PlainRoute
from gateway.schemas import ChatCompletionRequest
from gateway.services import body_of, caller_of, repeat_of, services_of

router = APIRouter(tags=["generation"], route_class=PlainRoute)


@router.post("/v1/chat/completions", openapi_extra=body_docs(ChatCompletionRequest), response_model=None)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as a stream of server-sent events if `stream` is true."""
    body = await body_of(request, ChatCompletionRequest)
    return GenerationResponse(
        services_of(request), body, caller_of(request), reference_of(request), repeat_of(request, body)
    )
