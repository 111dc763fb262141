"""The server on the page: plots, processes, the switch, keys, and how the page looks."""

from __future__ import annotations

import dataclasses
import re

import pytest
from browser_tools import TEXT, OpenPage, StartService, ask
from fake_engine import RANKS, FakeService, fake_facts
from playwright.sync_api import Page, Route, expect

from outrider.engine.speculation import SpeculationService
from outrider.links.gateway_messages import (
    ExplainSpeculation,
    ExplainSpeculationResult,
    ProcessState,
)
from outrider.links.speculation import StepAccount

pytestmark = pytest.mark.browser


def figure(page: Page, title: str) -> str:
    plot = page.locator(".plot", has_text=title)
    return plot.locator(".figure").text_content() or ""


def test_plots_move_with_the_load(start_service: StartService, open_page: OpenPage) -> None:
    service = start_service(step_s=0.05)
    page = open_page(service)
    speed = page.locator(".plot", has_text="Tokens/s")
    expect(speed.locator(".figure")).to_have_text("0.0")
    page.locator("#prompt").fill("Go on")
    page.keyboard.press("Enter")
    expect(speed.locator(".figure")).to_have_text(re.compile(r"^[1-9]\d*\.\d$"))
    expect(page.locator(".plot", has_text="Running").locator(".figure")).to_have_text("1, 0")
    assert figure(page, "KV cache") == "2\N{NO-BREAK SPACE}%"
    heights = {point.split(",")[1] for point in (speed_line(page) or "").lstrip("M").split("L")}
    assert len(heights) > 1
    service.engine.step_s = 0.001
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".plot", has_text="Running").locator(".figure")).to_have_text("0, 0")


def speed_line(page: Page) -> str | None:
    return page.locator(".plot", has_text="Tokens/s").locator(".line").get_attribute("d")


def test_a_killed_draft_is_seen_to_fall_and_to_come_back(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    tile = page.locator(".tile[data-name='draft 0']")
    expect(tile).to_have_attribute("data-state", "starting")
    *targets, draft = RANKS
    for state, told in {
        ProcessState.READY: "is back",
        ProcessState.LOST: "was lost",
        ProcessState.STARTING: "is restarting",
    }.items():
        service.engine.ranks = (*targets, dataclasses.replace(draft, state=state))
        expect(tile).to_have_attribute("data-state", state.value)
        expect(page.locator("#events li").first).to_contain_text(f"draft 0 {told}")
    expect(page.locator(".tile")).to_have_count(4)
    service.engine.stop()
    expect(page.locator(".tile[data-name='engine 0']")).to_have_attribute("data-state", "lost")


def settings(service: FakeService) -> tuple[str, int | None]:
    found = service.engine.speculation.settings()
    return found.policy, found.max_depth


def test_speculation_is_switched_bounded_and_switched_back(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    first, _ = settings(service)
    switch = page.get_by_role("switch")
    expect(switch).to_have_attribute("aria-checked", "true")
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "false")
    assert settings(service) == ("off", None)
    expect(page.locator("#policy")).to_have_value("off")
    switch.press("Space")
    expect(switch).to_have_attribute("aria-checked", "true")
    assert settings(service) == (first, None)
    page.locator("#policy").select_option("threshold")
    expect(page.locator("#policy-told")).to_contain_text("load")
    for typed, bound in (("2", 2), ("", None)):
        with page.expect_response("**/outrider/speculation"):
            page.locator("#bound").fill(typed)
            page.keyboard.press("Tab")
        assert settings(service) == ("threshold", bound)


def test_a_bound_that_is_refused_is_told_and_taken_back(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    expect(page.locator("#bound")).to_be_enabled()
    page.locator("#bound").fill("99")
    page.keyboard.press("Tab")
    expect(page.locator("#banner")).to_contain_text("max_depth")
    expect(page.locator("#bound")).to_have_value("")
    page.get_by_role("button", name="Dismiss").click()
    expect(page.locator("#banner")).to_be_hidden()


class _Stepped(SpeculationService):
    """Tells of a step, as a desk does whose engine has stepped."""

    def explain(self, message: ExplainSpeculation) -> ExplainSpeculationResult:
        reason = "two drafts pay"
        step = StepAccount(41, "goodput", 2, 0, 0, 2, 4, 0, (), None, reason, 5, 0.001, 0.004)
        return ExplainSpeculationResult(message.query, (step,), 1, ())


def test_the_last_steps_are_told_with_their_reasons(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    page.get_by_text("Last steps").click()
    expect(page.locator("#steps")).to_contain_text("No step yet.")
    service.engine.speculation.__class__ = _Stepped
    expect(page.locator("#steps li")).to_contain_text(
        "#41 2 rows · 4 drafts · 5 tokens in 5.0 mstwo drafts pay"
    )


def test_a_key_is_asked_for_and_kept_for_the_session_only(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(server={"api_key": "right"}))
    banner = page.locator("#banner")
    expect(banner).to_contain_text("No API key was sent")
    for key, told in (
        ("schlüssel–", "The key has characters that no header can carry"),
        ("wrong", "The API key is not valid here"),
        ("right", None),
    ):
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Use it").click()
        if told is None:
            expect(banner).to_be_hidden()
        else:
            expect(banner).to_contain_text(told)
    expect(page.locator("#state")).to_have_text("serving")
    ask(page)
    expect(page.locator(".answer .token").first).to_be_visible()
    assert page.evaluate("JSON.stringify(localStorage)").count("right") == 0
    assert page.evaluate("JSON.stringify(sessionStorage)").count("right") == 1


def test_a_lost_connection_is_told_and_found_again(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service())
    expect(page.locator("#state")).to_have_text("serving")
    page.context.set_offline(True)
    expect(page.locator("#banner")).to_contain_text(
        re.compile(r"The server cannot be reached.*Trying again in \d+ s")
    )
    expect(page.locator("#state")).to_have_text("no connection")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("serving")


# -- how it looks -----------------------------------------------------------------------------


def test_everything_comes_from_the_server_itself(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    ask(page)
    assert len(asked) > 10
    assert {url.split("/")[2] for url in asked} == {service.server.http_address}


@pytest.mark.parametrize("mode", ["chat", "complete", "race"])
def test_a_phone_has_nothing_to_scroll_sideways(
    mode: str, start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(
        start_service(), viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True
    )
    page.locator(f"[name=mode][value={mode}]").check(force=True)
    ask(page, "Donaudampfschifffahrtsgesellschaft" * 3 + TEXT)
    page.get_by_text("Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#send").bounding_box() is not None
    cut = page.evaluate(
        "[...document.querySelectorAll('button, input, select, h1, .tile, .plot')]"
        ".filter(e => e.checkVisibility() && e.getBoundingClientRect().right > 360).length"
    )
    assert cut == 0


SIZES = ((1280, 800), (1440, 900), (1280, 860), (390, 844))


def cut_off(page: Page, selector: str) -> list[str]:
    """Those that reach beyond what holds them, or whose contents do."""
    found: list[str] = page.evaluate(
        """selector => [...document.querySelectorAll(selector)].filter(each => {
          const own = each.getBoundingClientRect();
          const outer = each.parentElement.getBoundingClientRect();
          const inner = [...each.children].map(child => child.getBoundingClientRect());
          return own.right > outer.right + 1 || each.scrollWidth > each.clientWidth + 1
            || inner.some(child => child.right > own.right - 1 || child.bottom > own.bottom + 1);
        }).map(each => each.textContent || each.id)""",
        selector,
    )
    return found


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_processes_take_a_line_each_and_stay_within_their_borders(
    width: int, height: int, start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(), viewport={"width": width, "height": height})
    expect(page.locator(".tile[data-name='draft 0']")).to_be_visible()
    assert cut_off(page, ".tile") == []
    lines = page.evaluate(
        "[...document.querySelectorAll('.tile')].map("
        "e => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight))"
    )
    assert lines and max(lines) < 2


@pytest.mark.parametrize(("width", "height"), SIZES[:3])
def test_beside_the_prompt_the_whole_server_is_in_sight(
    width: int, height: int, start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(), viewport={"width": width, "height": height})
    expect(page.locator("#facts")).to_contain_text("Outrider")
    expect(page.locator(".tile")).to_have_count(4)
    for shown in ("#facts", "#tiles", "#plots", "#switch"):
        expect(page.locator(shown)).to_be_in_viewport(ratio=1)
    hidden = "(e => e.scrollHeight - e.clientHeight)(document.querySelector('.watch'))"
    assert page.evaluate(hidden) == 0


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_models_name_is_read_whole(
    width: int, height: int, start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(), viewport={"width": width, "height": height})
    if width < 720:
        page.get_by_text("Settings").click()
    model = page.locator("#model")
    expect(model).to_have_value("smollm2-135m-draft")
    shown = page.evaluate(
        """(() => {
          const select = document.getElementById("model"), style = getComputedStyle(select);
          const pen = document.createElement("canvas").getContext("2d");
          pen.font = `${style.fontSize} ${style.fontFamily}`;
          const arrow = 24, sides = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
          const name = pen.measureText("smollm2-135m-instruct").width;
          return select.clientWidth - sides - arrow - name;
        })()"""
    )
    assert shown >= 0
    assert model.get_attribute("title") == "smollm2-135m-draft"


def test_the_colours_are_explained_without_a_pointer(
    start_service: StartService, open_page: OpenPage
) -> None:
    service = start_service()
    page = open_page(service)
    note, toggle = page.locator("#legend .note").first, page.locator("#legend-toggle")
    expect(note).to_be_visible()
    expect(note).to_have_text("guessed by the draft model, confirmed by the target")
    ask(page)
    expect(note).to_be_hidden()  # beside an answer there are the colours alone
    toggle.press("Enter")
    expect(note).to_be_visible()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    ask(page)
    expect(note).to_be_visible()  # as its reader wants it
    size = {"width": 390, "height": 844}
    phone = open_page(service, viewport=size, is_mobile=True, has_touch=True)
    expect(phone.locator("#legend .note").first).to_be_hidden()
    phone.locator("#legend-toggle").tap()
    expect(phone.locator("#legend .note").first).to_be_visible()


def told_of(
    start_service: StartService, open_page: OpenPage, method: str = "draft", **changes: object
) -> str:
    """What is said of speculation with this state."""
    service = start_service()
    page = open_page(service)

    def change(route: Route) -> None:
        status = route.fetch().json()
        status["engine"]["speculation"] |= changes
        status["settings"]["method"] = method
        route.fulfill(json=status)

    page.route("**/outrider/status", change)
    page.reload()
    told = page.locator("#switch-told")
    expect(told).not_to_have_text("unknown yet")
    return (told.text_content() or "").replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        (
            "draft",
            {"drafting_share": 0.25, "mean_depth": 1.0, "gain": 1.031},
            "25 % of passes check 1 guessed token: about 1.03 × the speed without.",
        ),
        (
            "ngram",
            {"drafting_share": 1.0, "mean_depth": 2.5, "gain": None},
            "Every pass checks 2.5 guessed tokens found in the text.",
        ),
        ("draft", {"drafting_share": 0.0}, "On: ready to guess ahead."),
        ("off", {}, "No draft: --draft-model or --method ngram gives the server one."),
    ],
)
def test_speculation_is_told_in_words_for_newcomers(
    method: str,
    changes: dict[str, object],
    sentence: str,
    start_service: StartService,
    open_page: OpenPage,
) -> None:
    assert told_of(start_service, open_page, method, **changes) == sentence


def test_the_default_temperature_is_that_of_the_model(
    start_service: StartService, open_page: OpenPage
) -> None:
    facts = dataclasses.replace(fake_facts(), sampling_defaults={"temperature": 0.2})
    service = start_service(facts=facts)
    page = open_page(service)
    expect(page.locator("#temperature")).to_have_attribute("placeholder", "0.2, by default")
    ask(page)
    assert service.engine.submitted[-1].spec.params.temperature == 0.2


def ground(page: Page) -> int:
    """How light the page is, from 0 to 765."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_colours_follow_the_system_or_the_readers_choice(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(), color_scheme="dark")
    assert ground(page) < 150
    page.emulate_media(color_scheme="light")
    assert ground(page) > 600
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: dark")
    assert ground(page) < 150
    page.reload()
    assert ground(page) < 150


def test_every_control_is_reached_by_keys_and_shows_that_it_is(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service())
    expect(page.locator("#switch")).to_be_enabled()
    ask(page)
    page.locator("body").click(position={"x": 2, "y": 2})
    reached = {}
    for _ in range(45):
        page.keyboard.press("Tab")
        name, width, style = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            "return [e.id || e.className || e.tagName, s.outlineWidth, s.outlineStyle] })()"
        )
        reached[name] = width != "0px" and style != "none"
    wanted = {
        *("theme", "prompt", "send", "model", "temperature", "max-tokens", "method", "depth"),
        *("answer", "play", "forth", "back", "round", "switch", "policy", "bound", "clear"),
    }
    assert wanted <= set(reached)
    assert [name for name in wanted if not reached[name]] == []


def test_nothing_moves_for_readers_who_asked_for_that(
    start_service: StartService, open_page: OpenPage
) -> None:
    page = open_page(start_service(), reduced_motion="reduce")
    duration = "getComputedStyle(document.getElementById('send')).transitionDuration"
    assert page.evaluate(duration) == "0s"
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(duration) != "0s"
