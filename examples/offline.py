"""Generate text with and without speculation, and see that it is the same text.

python examples/offline.py
"""

from outrider import LLM, SamplingParams

PROMPTS = [
    "List three uses of a telescope.",
    "Write one sentence about the sea.",
]


def main() -> None:
    llm = LLM(
        model="smollm2-135m-instruct",
        draft_model="smollm2-135m-draft",
        num_speculative_tokens=3,
        deterministic=True,
    )
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    speculative = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=24))
    plain = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=24, speculation="off"))
    for prompt, ours, theirs in zip(PROMPTS, speculative, plain, strict=True):
        output, record = ours.outputs[0], ours.outputs[0].speculation
        print(f"> {prompt}\n{output.text}")
        print(
            f"  {record.accepted} of {record.drafted} drafts accepted, "
            f"{record.block_efficiency:.2f} tokens a round, "
            f"same text without speculation: {output.text == theirs.outputs[0].text}\n"
        )


if __name__ == "__main__":
    main()
