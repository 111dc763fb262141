"""Sampling parameters refuse what is wrong in one sentence that names the field and the value."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import ConfigError, RequestError
from outrider.scheduler.params import MAX_LOGPROBS, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 129),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", "warm"),
    ("top_k", -2),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-39),
    ("temperature", 10**400),
    ("logit_bias", [5]),
    ("logit_bias", 5),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {float("inf"): 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {3: 10**400}),
    ("bad_words", 5),
    ("bad_words", ["\ud800"]),
    ("stop", 5),
    ("stop", ["a\udfff"]),
    ("stop_token_ids", 0),
    ("logit_bias", {3: 101.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("bad_words", [""]),
    ("bad_words", ["a"] * 257),
    ("bad_words", ["a" * 257]),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", ["a"] * 65),
    ("stop", "a" * 257),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [-4]),
    ("stop_token_ids", [1] * 1025),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("seed", 2**64),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", -1),
    ("echo", None),
    ("skip_special_tokens", 0),
    ("speculation", "no name"),
    ("speculation", 1),
    ("num_speculative_tokens", 33),
    ("fix_depth", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message and "\n" not in message and message.endswith(".")


def test_as_many_as_allowed_are_accepted() -> None:
    SamplingParams(
        stop=["a" * 256] * 64,
        bad_words=["a" * 256] * 256,
        stop_token_ids=[1] * 1024,
        logit_bias=dict.fromkeys(range(1024), 1.0),
    )


def test_every_field_has_a_wrong_value_above() -> None:
    assert {name for name, _ in WRONG} == {f.name for f in dataclasses.fields(SamplingParams)}


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 9 but max_tokens is 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens"])
def test_a_number_that_no_message_holds_is_refused(name: str) -> None:
    given: dict[str, Any] = {"max_tokens": None, name: 2**64}
    with pytest.raises(RequestError, match=f"^{name} is beyond 64 bits; choose a smaller number.$"):
        SamplingParams(**given)


def test_too_many_stop_tokens_are_refused_without_a_look_at_each() -> None:
    with pytest.raises(RequestError, match="stop_token_ids has 1025 entries"):
        SamplingParams(stop_token_ids=[-1] * 1025)


def test_a_depth_to_keep_to_must_be_given() -> None:
    SamplingParams(fix_depth=True, num_speculative_tokens=0)
    with pytest.raises(RequestError, match="fix_depth is True but num_speculative_tokens is None"):
        SamplingParams(fix_depth=True)


def test_every_sample_carries_the_allowed_tokens_so_their_product_is_limited() -> None:
    SamplingParams(n=8, allowed_token_ids=[1] * 2**18)
    with pytest.raises(RequestError, match="allowed_token_ids has 262144 entries and n is 9"):
        SamplingParams(n=9, allowed_token_ids=[1] * 2**18)


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'zzz'; known are .*top_p"):
        SamplingParams.from_mapping({"zzz": 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean 'temperature'?"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("num_return_sequences", "did you mean 'n'?"),
        ("length_penalty", "none here does the same, so leave it out."),
        ("best_of", "none here does the same, so leave it out."),
        ("lora_request", "none here does the same, so leave it out."),
    ],
)
def test_a_wrong_keyword_is_a_wrong_call_that_says_what_was_meant(name: str, hint: str) -> None:
    options: dict[str, Any] = {name: 1}
    for make in (SamplingParams, partial(dataclasses.replace, SamplingParams())):
        with pytest.raises(TypeError) as caught:
            make(**options)
        assert str(caught.value) == f"unknown sampling parameter {name!r}; {hint}"
        assert isinstance(caught.value, RequestError)


def test_parameters_can_be_copied_and_sent_to_other_processes() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"])
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == params


def test_a_mapping_gives_the_same_parameters_as_keywords() -> None:
    values: dict[str, Any] = {"temperature": 0.5, "stop": "x", "logit_bias": {"7": 1}}
    assert SamplingParams.from_mapping(values) == SamplingParams(**values)


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    with pytest.raises(RequestError, match="stop must be a string or a list of them, not"):
        SamplingParams(stop={"end": 1})  # type: ignore[arg-type]


def test_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


# -- requests against a model ------------------------------------------------------------------

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="smollm2-135m-draft", max_model_len=MAX_MODEL_LEN, kv_cache_gb=0.05)


@pytest.fixture
def intact(llm: LLM) -> Iterator[LLM]:
    """The engine, which must work as before after whatever the test asked of it."""
    yield llm
    assert not llm.engine.has_work
    [request] = llm.generate("One more", SamplingParams(max_tokens=2, temperature=0))
    assert len(request.outputs[0].token_ids) == 2


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ({"prompt_token_ids": [1] * MAX_MODEL_LEN}, f"{MAX_MODEL_LEN} input tokens.*max_model_len"),
    ({"prompt_token_ids": [3, 49152]}, "holds 49152; token ids must be from 0 to 49151"),
    ({"prompt_token_ids": [3, -1]}, "holds -1"),
    ({"prompt_token_ids": [3, "x"]}, "holds 'x'"),
    ({"text": "x"}, "has the keys.*text"),
    (["fine", 5], "the prompt is 5; it must be text or a list of token ids"),
    (None, "prompts is None; it must be text"),
    (b"abc", "prompts is b'abc'; it must be text"),
]


@pytest.mark.model
@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused(intact: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        intact.generate(prompt, SamplingParams(max_tokens=2))


@pytest.mark.model
def test_one_bad_prompt_among_good_ones_runs_none_of_them(intact: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        intact.generate(["a good one", ""], SamplingParams(max_tokens=2))


@pytest.mark.model
def test_as_many_parameters_as_prompts_are_required(intact: LLM) -> None:
    with pytest.raises(RequestError, match="there are 2 prompts and 3 sampling parameters"):
        intact.generate(["a", "b"], [SamplingParams()] * 3)


@pytest.mark.model
def test_a_dict_in_place_of_parameters_is_refused(intact: LLM) -> None:
    params: Any = [{"temperature": 0}]
    with pytest.raises(RequestError, match="SamplingParams.from_mapping"):
        intact.generate("a", params)


@pytest.mark.model
@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_a_token_beyond_the_vocabulary_is_refused(intact: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} names token 49152"):
        intact.generate("a", SamplingParams.from_mapping({name: [49152]}))


@pytest.mark.model
def test_more_allowed_tokens_than_there_are_is_refused(intact: LLM) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids has 49153 entries"):
        intact.generate("a", SamplingParams(allowed_token_ids=[1] * 49153), use_tqdm=False)


@pytest.mark.model
@pytest.mark.parametrize("priority", [-101, 101, -(10**400), 0.5, True, None])
def test_a_priority_beyond_the_bounds_is_refused(intact: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority is .*; it must be a whole number from -100"):
        intact.generate("a", priority=priority)


@pytest.mark.model
def test_half_a_character_is_refused(intact: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt holds half a character .* at 1; give whole"):
        intact.generate("a\ud800")


@pytest.mark.model
def test_a_draft_is_refused_where_there_is_none(intact: LLM) -> None:
    with pytest.raises(RequestError, match="no draft model"):
        intact.generate("a", SamplingParams(speculation="draft"))


@pytest.mark.model
def test_an_empty_conversation_is_refused(intact: LLM) -> None:
    with pytest.raises(RequestError, match="the conversation is empty"):
        intact.chat([])


@pytest.mark.model
@pytest.mark.parametrize("messages", [5, {"role": "user", "content": "x"}, "hello", [5], [None]])
def test_what_is_no_conversation_is_refused(intact: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="it must be (a list of |){.role"):
        intact.chat(messages)


@pytest.mark.model
@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}, [None]], ids=str)
def test_what_are_no_sampling_parameters_is_refused(intact: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"^sampling_params (is|holds) .*SamplingParams\("):
        intact.generate("a", params)


@pytest.mark.model
@pytest.mark.parametrize("prompts", [None, 5, b"a", [None]], ids=str)
def test_what_is_no_prompt_is_refused(intact: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"(prompts|the prompt) is .*; it must be text"):
        intact.generate(prompts)


@pytest.mark.model
def test_a_message_without_a_role_is_refused(intact: LLM) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.role is missing; it must be 'system'"):
        intact.chat([{"content": "hello"}])


@pytest.mark.model
def test_the_output_ends_where_the_model_does(intact: LLM) -> None:
    prompt = {"prompt_token_ids": [5] * (MAX_MODEL_LEN - 3)}
    [request] = intact.generate(prompt, SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(request.outputs[0].token_ids) == 3
    assert request.outputs[0].finish_reason == "length"


def test_an_unknown_argument_of_llm_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match="draft_modle is no argument.*'draft_model'"):
        LLM(draft_modle="x")


def test_a_configuration_and_single_options_exclude_each_other() -> None:
    from outrider.config import EngineConfig

    with pytest.raises(ConfigError, match="either config or single options"):
        LLM(model="x", config=EngineConfig())


def test_a_fixed_depth_has_a_limit_since_its_neighbours_pay_for_it_as_well() -> None:
    SamplingParams(num_speculative_tokens=8, fix_depth=True)
    SamplingParams(num_speculative_tokens=32)
    with pytest.raises(RequestError, match="it may be 8"):
        SamplingParams(num_speculative_tokens=9, fix_depth=True)
