"""The page in a real browser: what a person types, presses and sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.serve import browser
from tests.zoo.serve.fake import Server, listening, until
from tests.zoo.serve.test_media import Media

VISIBLE = "[...document.querySelectorAll('main')].filter(e => !e.hidden).map(e => e.id).join()"
SAID = "[...document.querySelectorAll('#messages article.assistant span')].map(e => e.textContent)"
MARKUP = '<img src=x onerror="window.hit = 1"><b>bold</b> & "quotes"'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> browser.Page:
    with browser.page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def media(page: browser.Page) -> Media:
    """A server of all kinds, whose page is open; in the end nothing must have gone wrong in it."""
    media = Media(hosts=("127.0.0.1",))
    page.problems.clear()
    with listening(media.app) as address:
        page.open(address)
        page.until(f"{VISIBLE} === 'chat'")
        yield media
        assert page.run("window.hit") is None
        page.open("about:blank")
    assert page.problems == []


def test_a_chat_by_keyboard_alone(page, media):
    page.run("document.querySelector('#say').focus()")
    page.type(MARKUP)
    page.press("Enter", shift=True)
    page.type("second line")
    page.press("Enter")
    said = f"You said: {MARKUP}\nsecond line"
    page.until(f"{SAID}[0]?.length === {len(said)}")
    assert page.run(f"{SAID}[0]") == said  # as text: no element was made of it
    assert page.run("document.querySelectorAll('#messages img, #messages span b').length") == 0
    page.until("!document.querySelector('#chat-form .go').disabled")
    page.type("next")
    page.press("Enter")
    page.until(f"{SAID}[1] === 'You said: next'")
    assert "tokens" in page.until("document.querySelector('#chat-form .state').textContent")


def test_stop_ends_a_reply_and_frees_its_slot(page, media):
    media.batch.pace = 0.02
    page.run("document.querySelector('#say').focus()")
    page.type("the lazy dog " * 100)
    page.press("Enter")
    page.until(f"{SAID}[0]?.length > 5")
    page.press("Escape")
    page.until("document.querySelector('#chat-form .state').textContent.startsWith('stopped')")
    until(lambda: not media.batch.script)
    text = page.run(f"{SAID}[0]")
    assert 5 < len(text) < 1000
    page.run("document.querySelector('#new-chat').click()")
    assert page.run(SAID) == []


def test_an_error_is_told_and_what_was_typed_is_kept(page, media):
    page.run("document.querySelector('#say').focus()")
    page.type("x" * 5000)
    page.press("Enter")
    notice = "document.querySelector('#notice')"
    page.until(f"!{notice}.hidden && {notice}.textContent.includes('the context holds 4000')")
    assert page.run("document.querySelector('#say').value.length") == 5000
    page.problems.clear()  # the browser logs the status


def test_tabs_go_by_arrow_keys(page, media):
    page.run("document.querySelector('#tab-chat').focus()")
    shown = []
    for _ in range(3):
        page.press("ArrowRight")
        shown.append(page.run(VISIBLE))
        assert page.run("document.activeElement.getAttribute('aria-selected')") == "true"
    assert shown == ["draw", "transcribe", "chat"]


def test_a_picture_with_its_progress(page, media):
    page.run("document.querySelector('#tab-draw').click()")
    page.run("document.querySelector('#prompt').focus()")
    page.type(MARKUP)
    media.diffusion.go_on.clear()
    page.run("document.querySelector('#draw-form .go').click()")
    page.until("!document.querySelector('#draw-form progress').hidden")
    media.diffusion.go_on.set()
    picture = "document.querySelector('#pictures img')"
    page.until(f"document.querySelector('#pictures a') && {picture}.naturalWidth === 64")
    assert page.run(f"{picture}.alt") == MARKUP
    assert page.run("document.querySelector('#pictures a').download") == "picture.png"
    assert page.run("document.querySelectorAll('#pictures figure').length") == 1
    assert media.diffusion.asked[-1]["steps"] == 20


def test_a_transcript_of_a_file(page, media, tmp_path: Path):
    file = tmp_path / "talk.wav"
    file.write_bytes(b"sound")
    page.run("document.querySelector('#tab-transcribe').click()")
    page.choose_file("#file", file)
    page.run("document.querySelector('#transcribe-form .go').click()")
    page.until("!document.querySelector('#copy').hidden")
    lines = page.run("[...document.querySelectorAll('#segments li')].map(e => e.innerText)")
    assert [line.split() for line in lines] == [
        ["0:00.0", "–", "0:01.0", "one", "two"],
        ["0:01.0", "–", "0:02.0", "three", "four"],
        ["0:02.0", "–", "0:03.0", "five"],
    ]
    assert media.whisper.asked[-1]["bytes"] == b"sound"


def test_light_and_dark(page, media):
    back = "getComputedStyle(document.body).backgroundColor"
    page.scheme("light")
    light = page.run(back)
    page.scheme("dark")
    dark = page.run(back)
    assert light != dark
    page.run("document.querySelector('#theme').click()")  # system -> light, whatever that prefers
    assert page.run(back) == light
    page.run("document.querySelector('#theme').click()")
    page.scheme("light")
    assert page.run(back) == dark
    page.run("document.querySelector('#theme').click()")
    page.scheme("light")


def test_every_control_has_a_name_and_ids_are_unique(page, media):
    nameless = """[...document.querySelectorAll('input, textarea, select')].filter(
        e => !e.labels.length && !e.getAttribute('aria-label')).map(e => e.outerHTML)"""
    assert page.run(nameless) == []
    assert page.run("[...document.querySelectorAll('button')].every(e => e.textContent.trim())")
    ids = page.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_only_what_is_served_has_a_tab_and_a_key_is_asked_for(page):
    with listening(Server(keys=("secret",)).app) as address:
        page.open(address)
        page.until("!document.querySelector('#login').hidden")
        page.run("document.querySelector('#key').focus()")
        page.type("secret")
        page.press("Enter")
        page.until(f"{VISIBLE} === 'chat'")
        tabs = "[...document.querySelectorAll('[role=tab]')].filter(e => !e.hidden).map(e => e.id)"
        assert page.run(tabs) == ["tab-chat"]
        page.run("document.querySelector('#say').focus()")
        page.type("hello")
        page.press("Enter")
        page.until(f"{SAID}[0] === 'You said: hello'")
        page.open("about:blank")
