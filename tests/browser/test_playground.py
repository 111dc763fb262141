"""Asking on the page: streams, colours, the stepper, the race, and what goes wrong."""

from __future__ import annotations

import itertools
import re

import pytest
from browser_tools import OpenPage, StartService, ask, text_ids
from fake_engine import FakeService, tokenizer
from playwright.sync_api import Locator, Page, expect
from waits import wait_until

pytestmark = pytest.mark.browser


def style_of(token: Locator) -> tuple[str, str]:
    """What tells the origin of a token: its ground, and the kind of line under it."""
    found: list[str] = token.evaluate(
        "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).textDecorationStyle]"
    )
    return found[0], found[1]


def expected_text(service: FakeService) -> str:
    """Of the last request, if nothing is lost on the way."""
    spec = service.engine.submitted[-1].spec
    ids = text_ids()
    return str(
        tokenizer().decode([ids[at % len(ids)] for at in range(len(spec.prompt_ids), spec.max_len)])
    )


def test_a_typed_prompt_is_answered_with_every_token(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    expect(page).to_have_title("Outrider")
    expect(page.locator("#state")).to_have_text("serving")
    page.get_by_label("Max tokens").fill("60")
    ask(page)
    assert page.locator(".user-prompt").text_content() == "How do rainbows form?"
    assert page.locator(".answer").text_content() == expected_text(service)
    assert len(service.engine.submitted[-1].spec.prompt_ids) + 60 == (
        service.engine.submitted[-1].spec.max_len
    )
    expect(page.locator("#told")).to_contain_text(re.compile(r"60 tokens · \d+ rounds · .* s · "))


def test_an_answer_is_seen_before_it_is_finished(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    page.locator("#prompt").fill("Go on")
    service.engine.step_s = 0.1
    page.keyboard.press("Enter")
    expect(page.locator(".answer .token").nth(3)).to_be_visible()
    assert service.engine.running
    service.engine.step_s = 0.001
    expect(page.locator("#send")).to_be_enabled()


def test_every_origin_has_a_ground_and_a_line_of_its_own(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service())
    page.get_by_text("Complete", exact=True).click()
    page.get_by_label("Max tokens").fill("24")
    page.locator("#depth").fill("2")
    looks = {}
    for method, prompt, origins in (
        # Of two drafts the engine accepts as many as the text's length is over a multiple of three.
        ("draft", "rain", {"draft", "recovered"}),
        ("ngram", "rain rain", {"ngram", "bonus"}),
        ("off", "rain", {"target"}),
    ):
        page.get_by_label("Drafts by").select_option(method)
        ask(page, prompt)
        answer = page.locator(".answer").last
        found = {str(each.get_attribute("data-look")) for each in answer.locator(".token").all()}
        assert origins <= found <= origins | {"target"}  # the last token may need no draft
        for origin in origins:
            looks[origin] = style_of(answer.locator(f".token[data-look={origin}]").first)
            assert style_of(page.locator(f"#legend .token[data-look={origin}]")) == looks[origin]
    assert len({ground for ground, _ in looks.values()}) == len(looks) == 5
    assert len({line for _, line in looks.values()}) == 5


def test_a_token_tells_where_it_came_from_by_pointer_and_by_keys(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service())
    ask(page)
    told, answer = page.locator("#told"), page.locator(".answer")
    answer.locator(".token[data-look=recovered]").nth(1).hover()
    expect(told).to_contain_text(re.compile(r"^“.+” · recovered · round \d+ · "))
    page.locator("h1").hover()
    expect(told).to_contain_text("tokens/s")
    answer.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    second = answer.locator(".token").nth(1)
    expect(second).to_have_class(re.compile("is-picked"))
    expect(told).to_contain_text(f"“{(second.text_content() or '').strip()}”")


def test_the_stepper_replays_the_rounds(start_service: StartService, open_page: OpenPage) -> None:
    page = open_page(start_service())
    page.get_by_label("Max tokens").fill("30")
    page.locator("#depth").fill("2")
    ask(page)
    told, later = page.locator("#told"), page.locator(".answer .token.is-later")
    num_rounds = page.locator("#rounds g").count()
    page.get_by_label("One round on").click()
    expect(told).to_contain_text(f"Round 1 of {num_rounds}:")
    assert later.count() > 10
    sentences = [told.text_content()]
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        sentences.append(told.text_content())
    # Of two drafts the engine accepts as many as the text's length is over a multiple of three.
    assert {re.sub(r"Round \d+ of \d+: |“.+”", "", str(each)) for each in sentences} <= {
        "2 drafted, 0 accepted, then  instead.",
        "2 drafted, 1 accepted, then  instead.",
        "2 drafted, 2 accepted, then  as a bonus.",
    }
    page.get_by_label("Round", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(told).to_contain_text("Round 4 of")
    now = page.locator(".answer .token.is-now")
    assert {each.get_attribute("data-round") for each in now.all()} == {"3"}
    page.locator("#rounds g").nth(1).click()
    expect(told).to_contain_text("Round 2 of")
    page.get_by_role("button", name="Whole text").click()
    expect(later).to_have_count(0)


def test_a_replayed_round_is_in_sight_beside_the_stepper_on_a_phone(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(), viewport={"width": 360, "height": 740})
    ask(page)
    now, forth = page.locator(".answer .token.is-now").first, page.get_by_label("One round on")
    page.get_by_label("Round", exact=True).press("Home")
    for _ in range(2):
        expect(now).to_be_in_viewport(ratio=1)
        expect(forth).to_be_in_viewport(ratio=1)
        page.get_by_label("Round", exact=True).press("End")


def test_play_goes_through_the_rounds_by_itself(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service())
    ask(page)
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#told")).to_contain_text(re.compile(r"Round ([3-9]|\d\d+) of"))
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


@pytest.mark.parametrize("order", ["turns", "once"])
def test_a_race_runs_the_same_request_with_and_without_speculation(
    order: str, start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    page.get_by_text("Race", exact=True).first.click()
    page.locator("#order").select_option(order)
    page.get_by_label("Temperature").fill("0.8")
    ask(page)
    expect(page.locator("#verdict")).to_contain_text("Both texts are equal.")
    expect(page.locator("#verdict")).to_contain_text("× as fast")
    for lane in ("with", "without"):
        expect(page.locator(f"#time-{lane}")).to_have_text(
            re.compile(r"^\d+\.\d\d s · \d+\.\d tokens/s · 160 tokens$")
        )
    specs = [each.spec for each in service.engine.submitted]
    assert sorted(each.proposer or "" for each in specs) == ["", "draft"]
    assert specs[0].seed == specs[1].seed
    assert page.locator("#text-without .token:not([data-look=target])").count() == 0
    assert page.locator("#text-with .token[data-look=draft]").count() > 0


def test_a_race_tells_where_texts_part(start_service: StartService, open_page: OpenPage) -> None:
    numbers = itertools.count(1000)
    page = open_page(start_service(script=lambda seed, position: next(numbers)))
    page.get_by_text("Race", exact=True).first.click()
    page.get_by_label("Max tokens").fill("20")
    ask(page)
    expect(page.locator("#verdict")).to_contain_text("The texts differ from character 1 on:")


def test_stop_cancels_and_keeps_what_was_written(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service(step_s=0.05)
    page = open_page(service)
    page.locator("#prompt").fill("Go on")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .token").nth(2)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#send")).to_be_enabled()
    wait_until(lambda: bool(service.engine.cancelled) and not service.engine.running)
    assert page.locator(".answer .token").count() >= 3
    expect(page.locator("#banner")).to_be_hidden()


def test_a_conversation_goes_on_where_it_was(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    page.get_by_label("Max tokens").fill("20")
    ask(page, "What is a rainbow?")
    answer = page.locator(".answer").text_content() or ""
    ask(page, "And a halo?")
    prompt = tokenizer().decode(service.engine.submitted[-1].spec.prompt_ids)
    assert re.search(
        f"What is a rainbow.*{re.escape(answer.strip())}.*And a halo", prompt, re.DOTALL
    )
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".answer")).to_have_count(0)
    ask(page, "And a halo?")
    prompt = tokenizer().decode(service.engine.submitted[-1].spec.prompt_ids)
    assert "rainbow" not in prompt


def test_a_text_is_continued(start_service: StartService, open_page: OpenPage) -> None:
    service = start_service()
    page = open_page(service)
    page.get_by_text("Complete", exact=True).click()
    page.get_by_label("Max tokens").fill("12")
    ask(page, "The capital of France is")
    spec = service.engine.submitted[-1].spec
    assert tokenizer().decode(spec.prompt_ids) == "The capital of France is"
    assert page.locator(".answer").text_content() == expected_text(service)


def test_an_example_is_asked_with_one_click(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service())
    page.get_by_role("button", name="Why is the sky blue?").click()
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".answer .token").first).to_be_visible()


def send(page: Page, prompt: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.keyboard.press("Enter")


def test_a_refused_prompt_is_told_in_the_servers_words_and_kept(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    expect(page.locator("#state")).to_have_text("serving")
    service.engine.stop()
    expect(page.locator("#state")).to_have_text("engine away")
    send(page, "Are you there?")
    expect(page.locator("#banner")).to_contain_text("The engine is away and being restarted")
    expect(page.locator("#prompt")).to_have_value("Are you there?")
    service.engine.start()
    expect(page.locator("#state")).to_have_text("serving")
    ask(page, "Are you there?")
    expect(page.locator("#banner")).to_be_hidden()
    assert page.locator(".answer").text_content() == expected_text(service)


def test_an_error_in_the_middle_of_an_answer_is_told(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service(step_s=0.05, server={"resubmit_timeout_s": 0.1})
    page = open_page(service)
    send(page, "Go on")
    expect(page.locator(".answer .token").nth(2)).to_be_visible()
    service.engine.stop()
    expect(page.locator("#banner")).to_be_visible()
    expect(page.locator("#banner")).to_contain_text("engine")
    expect(page.locator("#send")).to_be_enabled()
    assert page.locator(".answer .token").count() >= 3
