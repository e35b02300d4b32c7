"""A backend that submits and forgets: a webhook tells it when a job has ended.

Questions come in over HTTP, go out as jobs, and are answered when Ropeway calls back. No connection stays open
meanwhile, and this process may be restarted in between: a real one keeps `answers` in its database.

    pip install fastapi uvicorn standardwebhooks, and ropeway for its client
    WEBHOOK_SECRET=whsec_... PUBLIC_URL=https://app.example.com .venv/bin/python examples/fastapi_backend.py 8080
    curl -d '{"question": "What is a ropeway?"}' -H 'content-type: application/json' localhost:8080/questions
    curl localhost:8080/questions/<id>

WEBHOOK_SECRET is what `ropeway webhooks secret` prints, PUBLIC_URL where Ropeway reaches this process. For one on the
same machine that is http://127.0.0.1:8080, with ROPEWAY_WEBHOOK_HTTP=true and ROPEWAY_WEBHOOK_ALLOW='["127.0.0.1"]' for
Ropeway's gateway and tasks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel
from standardwebhooks import Webhook, WebhookVerificationError

from ropeway.client import APIError, AsyncClient

ROPEWAY_URL = os.environ.get("ROPEWAY_URL", "http://127.0.0.1:8000")
PUBLIC_URL = os.environ.get("PUBLIC_URL", "http://127.0.0.1:8080")
webhook = Webhook(os.environ["WEBHOOK_SECRET"])

#: By the job's id: None until the webhook has come.
answers: dict[str, dict[str, Any] | None] = {}
#: Ids of webhooks that were taken in: one may come twice.
seen: set[str] = set()


class Question(BaseModel):
    """What a user asks."""

    question: str
    max_tokens: int = 200


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncClient(ROPEWAY_URL, api_key=os.environ.get("ROPEWAY_API_KEY")) as client:
        app.state.ropeway = client
        app.state.model = os.environ.get("MODEL") or (await client.models())[0]
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/questions", status_code=202)
async def ask(question: Question, request: Request) -> dict[str, str]:
    """Submit a job and be done."""
    state = request.app.state
    try:
        job = await state.ropeway.submit(
            question.question,
            model=state.model,
            max_tokens=question.max_tokens,
            callback_url=f"{PUBLIC_URL}/webhooks",
        )
    except APIError as error:
        raise HTTPException(502, str(error)) from error
    answers.setdefault(job.id, None)  # the webhook may be here already
    return {"id": job.id}


@app.get("/questions/{job_id}")
async def look(job_id: str) -> dict[str, Any]:
    """What is known of a question."""
    if job_id not in answers:
        raise HTTPException(404, "no such question")
    return answers[job_id] or {"status": "pending"}


@app.post("/webhooks", status_code=204)
async def receive(request: Request) -> None:
    """Take a webhook in: verified over the bytes as they came, and each only once."""
    body = await request.body()
    try:
        event = webhook.verify(body, dict(request.headers))
    except WebhookVerificationError as error:
        raise HTTPException(401, "not signed by Ropeway") from error
    if request.headers["webhook-id"] in seen:
        return
    job = event["data"]
    choices = (job["result"] or {}).get("choices") or []
    text = choices[0]["message"]["content"] if choices else None
    answers[job["id"]] = {"status": job["status"], "answer": text}
    seen.add(request.headers["webhook-id"])


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
