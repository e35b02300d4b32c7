"""A batch with the official client: upload a file of requests, wait for the batch's end, fetch what it has written.

    ropeway serve                                            # in another terminal
    python examples/batch_file.py                            # questions of its own
    python examples/batch_file.py --url http://127.0.0.1:8000 --lines 20

A gateway and a tasks process are needed (`ropeway serve` starts both). The batch goes on whatever becomes of this
process: `--batch batch_...` waits for one that was begun before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

from openai import OpenAI
from openai.types import Batch

ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def requests(model: str, count: int) -> Iterator[dict[str, object]]:
    """Lines of the input: each with an id of its own, under which its answer is found."""
    for number in range(1, count + 1):
        question = f"A ropeway has {number} cabins, and half of them are full. How many are that?"
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32}
        yield {"custom_id": f"question-{number}", "method": "POST", "url": ENDPOINT, "body": body}


def begin(client: OpenAI, model: str, count: int) -> Batch:
    """Upload the lines, and have them begun."""
    data = "".join(json.dumps(line) + "\n" for line in requests(model, count))
    file = client.files.create(file=("questions.jsonl", data.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def wait(client: OpenAI, batch: Batch) -> Batch:
    """The batch once it has ended."""
    while batch.status not in ENDED:
        counts = batch.request_counts
        if counts is not None:
            print(f"{batch.status}: {counts.completed} of {counts.total}", file=sys.stderr)
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    return batch


def show(client: OpenAI, batch: Batch) -> None:
    """Answers and errors, by custom id."""
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        for text in client.files.content(file_id).text.splitlines():
            line = json.loads(text)
            body = (line["response"] or {}).get("body") or {}
            error = line["error"] or body.get("error")
            said = error["message"] if error else body["choices"][0]["message"]["content"]
            print(f"{line['custom_id']}: {' '.join(said.split())}")


def main() -> int:
    """Run it; 0 where the batch has completed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--lines", type=int, default=5, help="how many requests")
    parser.add_argument("--batch", help="wait for this batch, and begin none")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        if options.batch:
            batch = client.batches.retrieve(options.batch)
        else:
            batch = begin(client, client.models.list().data[0].id, options.lines)
        print(f"batch {batch.id}", file=sys.stderr)
        batch = wait(client, batch)
        for fault in (batch.errors.data or []) if batch.errors else []:
            print(f"line {fault.line}: {fault.message}", file=sys.stderr)
        show(client, batch)
        print(f"{batch.status}: {batch.request_counts}", file=sys.stderr)
    return 0 if batch.status == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
