"""The snippets of vLLM's page on speculative decoding; only the import and the models differ.

python examples/vllm_snippets.py
"""

from outrider import LLM, SamplingParams


def speculating_with_a_draft_model() -> None:
    prompts = [
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(
        model="smollm2-135m-instruct",
        tensor_parallel_size=1,
        speculative_model="smollm2-135m-draft",
        num_speculative_tokens=5,
    )
    outputs = llm.generate(prompts, sampling_params)

    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")


def speculating_by_matching_ngrams_in_the_prompt() -> None:
    prompts = [
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(
        model="smollm2-135m-instruct",
        tensor_parallel_size=1,
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
    )
    outputs = llm.generate(prompts, sampling_params)

    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")


if __name__ == "__main__":
    speculating_with_a_draft_model()
    speculating_by_matching_ngrams_in_the_prompt()
