"""A page that shows a job's tokens as they come: python examples/browser/server.py, then http://127.0.0.1:8080.

Start Ropeway with `ROPEWAY_CORS_ORIGINS='["http://127.0.0.1:8080"]' make serve`. The key, if there is one, stays here:
the page gets a token that opens the events of its own job for five minutes.
"""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

BASE = os.environ.get("ROPEWAY_URL", "http://127.0.0.1:8000")
PORT = int(os.environ.get("PORT", "8080"))
KEY = os.environ.get("ROPEWAY_API_KEY", "none")
MODEL = os.environ.get("ROPEWAY_MODEL", "smollm2-135m-instruct")
MAX_PROMPT_BYTES = 10_000


class Handler(BaseHTTPRequestHandler):
    """The page, and `/ask`."""

    def do_GET(self) -> None:
        page = Path(__file__).with_name("index.html").read_bytes()
        self._answer(page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        length = min(int(self.headers.get("content-length", 0)), MAX_PROMPT_BYTES)
        prompt = self.rfile.read(length).decode()
        with httpx.Client(base_url=BASE, headers={"Authorization": f"Bearer {KEY}"}) as http:
            body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 200}
            job = http.post("/v1/jobs", json={"kind": "chat", "body": body}).raise_for_status().json()
            token = http.post(f"/v1/jobs/{job['id']}/token", json={"expires_in_s": 300}).raise_for_status().json()
        self._answer(json.dumps({"url": BASE + token["url"]}).encode(), "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
