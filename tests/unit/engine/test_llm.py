"""Ctrl-C during `LLM.generate`: the call ends, the engine goes on."""

import os
import signal
import threading

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.llm import interrupts_between_steps


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
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    endless = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("The sky is", endless)
    [again] = llm.generate("The sky is", params)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    scheduler = llm.engine.built.loop.scheduler
    scheduler.check_integrity()
    assert scheduler.target_pool.num_free == scheduler.target_pool.num_blocks
