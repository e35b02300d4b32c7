"""The code of docs/webhooks.md works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from shared.webhook_signing import new_secret

PAGE = (Path(__file__).parents[3] / "docs" / "webhooks.md").read_text("utf-8")


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_node_verifies_without_a_library(tmp_path: Path) -> None:
    [code] = [block for block in re.findall(r"```js\n(.+?)```", PAGE, re.DOTALL) if "export function" in block]
    secret, other, body = new_secret(), new_secret(), '{"text":"\u00e4"}'
    now = datetime.now(UTC)

    def headers(at: datetime, *secrets: str) -> dict[str, str]:
        signatures = " ".join(Webhook(one).sign("msg_1", at, body) for one in secrets)
        stamp = str(int(at.timestamp()))
        return {"webhook-id": "msg_1", "webhook-timestamp": stamp, "webhook-signature": signatures}

    good = headers(now, other, secret)
    cases = [
        (secret, good, body, True),
        (new_secret(), good, body, False),
        (secret, good, body + " ", False),
        (secret, {**good, "webhook-id": "msg_2"}, body, False),
        (secret, headers(now - timedelta(hours=1), secret), body, False),
        (secret, {**good, "webhook-timestamp": "soon"}, body, False),
        (secret, {**good, "webhook-signature": "v1"}, body, False),
        (secret, {**good, "webhook-signature": "v2,AAAA v1,AAAA"}, body, False),
    ]
    more = f"\nconst cases = {json.dumps([case[:3] for case in cases])};\n"
    more += "console.log(JSON.stringify(cases.map(([secret, headers, body]) => verify(secret, headers, body))));\n"
    script = tmp_path / "verify.mjs"
    script.write_text(code + more, "utf-8")
    answer = subprocess.run(["node", str(script)], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == [case[3] for case in cases]


def test_python_verifies_with_the_library() -> None:
    assert "from standardwebhooks import Webhook" in PAGE and ".verify(body, headers)" in PAGE
