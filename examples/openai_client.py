"""The `openai` client against `outrider serve`: chat, a stream, and what speculation did.

pip install openai
python examples/openai_client.py http://localhost:8000/v1
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    # A server without keys takes any.
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three rivers in Europe."}]

    answer = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]  # plain dicts do
        max_tokens=48,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    print(answer.usage, "\n")

    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=48,
        temperature=0,
        stream=True,
        extra_body={"return_speculation": True, "num_speculative_tokens": 3},
    )
    statistics = None
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        statistics = getattr(chunk, "speculation_stats", None) or statistics
    print("\n", statistics)


if __name__ == "__main__":
    main()
