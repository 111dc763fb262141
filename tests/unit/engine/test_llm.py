"""`LLM` around its requests: Ctrl-C, its end, its tokenizer and what it says meanwhile."""

import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import outrider
from outrider import LLM, SamplingParams
from outrider.checkpoints.resolve import draft_assets
from outrider.engine.llm import interrupts_between_steps
from outrider.errors import EngineDeadError, ModelError, RequestError
from outrider.progress import ProgressLines

SMALL = "smollm2-135m-draft"


def test_an_interrupt_is_raised_at_the_next_check_and_not_before() -> None:
    with interrupts_between_steps() as check:
        check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()


def test_a_second_interrupt_does_not_wait() -> None:
    with interrupts_between_steps():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_between_steps():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.model
def test_an_interrupted_call_leaves_a_working_engine_and_frees_its_memory() -> None:
    llm = LLM(model="smollm2-135m-draft", draft_model="smollm2-135m-draft", deterministic=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [expected] = llm.generate("The sky is", params)
    scheduler = llm.engine.built.loop.scheduler
    before = scheduler.stats.steps

    def interrupt() -> None:
        """In the midst of the call: elsewhere it would end all tests of this process."""
        while scheduler.stats.steps < before + 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    endless = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("The sky is", endless)
    [again] = llm.generate("The sky is", params)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    scheduler.check_integrity()
    assert scheduler.target_pool.num_free == scheduler.target_pool.num_blocks


@pytest.mark.model
def test_a_closed_llm_says_so() -> None:
    with LLM(SMALL, kv_cache_gb=0.05) as llm:
        llm.generate("The sky is")
    for call in (lambda: llm.generate("The sky is"), lambda: llm.chat([])):
        with pytest.raises(EngineDeadError, match="this LLM was closed; make another"):
            call()


@pytest.mark.model
def test_parameters_may_be_given_by_name_as_to_a_client() -> None:
    llm = LLM(SMALL, kv_cache_gb=0.05)
    [output] = llm.generate("The sky is", max_tokens=3, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 3
    message = {"role": "user", "content": "Hello"}
    [output] = llm.chat([message], SamplingParams(ignore_eos=True), max_tokens=2)
    assert len(output.outputs[0].token_ids) == 2
    with pytest.raises(RequestError, match="'temprature'; did you mean 'temperature'"):
        llm.generate("The sky is", temprature=0)


@pytest.mark.model
def test_the_tokenizer_has_the_name_of_the_target() -> None:
    llm = LLM(draft_model="none", kv_cache_gb=0.05, max_model_len=64)
    assert llm.get_tokenizer().name_or_path == "smollm2-135m-instruct"


@pytest.mark.model
def test_a_tokenizer_may_come_from_another_folder(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "tokenizer"
    model.mkdir()
    other.mkdir()
    for file in draft_assets().iterdir():
        is_tokenizers = file.name.startswith(("tokenizer", "special", "vocab", "merges", "chat"))
        (other if is_tokenizers else model).joinpath(file.name).symlink_to(file)
    with LLM(str(model), tokenizer=str(other), kv_cache_gb=0.05) as llm:
        [output] = llm.generate("The sky is", SamplingParams(temperature=0))
        assert llm.get_tokenizer().name_or_path == str(other)
    with LLM(SMALL, kv_cache_gb=0.05) as whole:
        [expected] = whole.generate("The sky is", SamplingParams(temperature=0))
    assert output.outputs[0].text == expected.outputs[0].text


@pytest.mark.model
def test_a_tokenizer_that_was_asked_for_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        LLM(SMALL, tokenizer=str(tmp_path), kv_cache_gb=0.05)


@pytest.mark.model
def test_a_batch_is_told_of_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.llm.ProgressLines", partial(ProgressLines, every_s=0.0))
    llm = LLM(SMALL, kv_cache_gb=0.05)
    llm.generate(["The sky is", "The sea is"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert re.search(r"generating: 2 of 2 done, 4 tokens, \d+ s so far", capsys.readouterr().err)
    llm.generate("The sky is", use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_every_public_name_is_listed_and_found() -> None:
    assert set(outrider.__all__) <= set(dir(outrider))
    assert {"LLM", "AsyncEngine", "EngineConfig", "Client", "SamplingParams"} <= set(dir(outrider))
    assert all(getattr(outrider, name).__name__ == name for name in outrider.__all__)
