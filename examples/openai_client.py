"""The OpenAI client against Ropeway: chat, stream, a list of prompts, an error.

Run `make serve` in another terminal, then: .venv/bin/python examples/openai_client.py [URL]
Where the gateway asks for a key, OPENAI_API_KEY has it.
"""

from __future__ import annotations

import os
import sys

from openai import BadRequestError, OpenAI


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": "What is a ropeway? One sentence."}]

        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60, temperature=0)
        print("chat:  ", answer.choices[0].message.content)

        print("stream: ", end="")
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=60, temperature=0, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        both = client.completions.create(
            model=model, prompt=["The Alps are", "A cable is"], max_tokens=16, temperature=0
        )
        for choice in both.choices:
            print(f"prompt {choice.index}:", choice.text)

        try:
            client.chat.completions.create(model=model, messages=messages, top_p=7)
        except BadRequestError as error:
            print(f"error:   {error.param}: {error.message}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
