"""Talk to a server that `make serve` or `outrider serve` has started.

.venv/bin/python examples/client.py [localhost:50051]
"""

from __future__ import annotations

import sys

from outrider.client import DEFAULT_SERVER, Client


def main() -> None:
    with Client(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_SERVER) as client:
        client.wait_ready(timeout_s=60)

        answer = client.chat(
            [{"role": "user", "content": "Name three rivers."}], temperature=0.0, max_tokens=48
        )
        print(answer.text)
        print(
            f"{answer.usage.completion_tokens} tokens, "
            f"{answer.speculation.block_efficiency:.2f} a round, seed {answer.seed}"
        )

        print("\nThe same seed gives the same text, drafted for or not:")
        texts = [
            client.generate(
                "Once upon a time", seed=7, temperature=0.7, max_tokens=24, speculation=method
            ).text
            for method in ("draft", "ngram", "off")
        ]
        print(texts[0].strip())
        print("same text by every method:", len(set(texts)) == 1)

        print("\nStreamed, each piece with the tokens that were drafted in it:")
        for chunk in client.stream("One, two, three,", temperature=0.0, max_tokens=16):
            drafted = sum(origin != "target" for origin in chunk.origins)
            print(f"{chunk.text!r} ({drafted} of {len(chunk.token_ids)} drafted)")


if __name__ == "__main__":
    main()
