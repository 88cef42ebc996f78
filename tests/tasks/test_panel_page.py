"""The panel's page in a real browser: five raters with known biases vote by keyboard, mouse, touch, in two languages, with breaks."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tasks.panel import Config, run
from tasks.panel_plan import LOW_ANCHOR, RATINGS, REFERENCE, Showing, order, read
from tasks.panel_server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian, Ubuntu: apt-get install chromium)"),
    pytest.mark.timeout(400),
]
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "assets/eval/audio_mos_golden.json").read_text(encoding="utf-8")
)
SCALES = ("picture", "sound", "sync", "overall")
ROWS = {LOW_ANCHOR: (0, 5), "candidate": (2, 1), REFERENCE: (4, 3)}
"""Rows of the golden matrix that stand for a system's two films."""
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 667}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--mute-audio"])
        yield browser
        browser.close()


@pytest.fixture
def server(panel_folder: Path) -> Iterator[Server]:
    with Server(panel_folder, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport=DESKTOP, locale="en-GB")
    yield context
    context.close()


def link(server: Server, token: str) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/#{token}"


def opened(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.goto(address)
    page.locator("#start").click()
    page.locator("#play").wait_for()
    return page


def watch(page: Page) -> None:
    """Press play and wait until the votes may be given."""
    page.locator("#play").click()
    page.locator("fieldset:enabled").first.wait_for()


def until(page: Page, condition: str) -> None:
    """Wait for a condition; the driver's own waiting evaluates text inside the page, which the page's policy forbids."""
    while not page.evaluate(condition):
        page.wait_for_timeout(20)


def wait_for_next(page: Page, position: int) -> None:
    until(page, f"!state || state.position > {position}")


def vote_of(server: Server, showing: Showing, rater: int) -> int:
    """The golden vote of a rater on a film; what is for training gets a 1."""
    if showing.item.training:
        return 1
    place = server.panel.sources.index(showing.item.source)
    return GOLDEN["mos_matrix_6_stimuli_x_5_raters"][ROWS[showing.item.system][place]][rater - 1]


def by_keyboard(page: Page, vote: int) -> None:
    page.keyboard.press("2")
    page.keyboard.press("Backspace")  # a slip of the finger
    for _ in SCALES:
        page.keyboard.press(str(vote))
    page.keyboard.press("Enter")


def by_mouse(page: Page, vote: int) -> None:
    for scale in reversed(SCALES):
        page.locator(f"input[name={scale}][value='{vote}']").click()
    page.locator("#submit").click()


def by_touch(page: Page, vote: int) -> None:
    for scale in SCALES:
        page.locator(f"input[name={scale}][value='{vote}']").tap()
    page.locator("#submit").tap()


RATERS = (
    ({"viewport": DESKTOP, "locale": "en-GB"}, by_keyboard),
    ({"viewport": DESKTOP, "locale": "zh-CN"}, by_mouse),
    ({"viewport": PHONE, "locale": "zh-CN", "has_touch": True, "is_mobile": True}, by_touch),
    ({"viewport": PHONE, "locale": "de-DE", "has_touch": True, "is_mobile": True}, by_touch),
    ({"viewport": DESKTOP, "locale": "en-GB", "color_scheme": "dark"}, by_mouse),
)


def test_five_raters_through_the_real_page_give_the_golden_statistics(server: Server, browser: Browser) -> None:
    for rater, (token, (settings, give)) in enumerate(zip(server.log.invite(5, 0.0), RATERS, strict=True), 1):
        context = browser.new_context(**settings)
        page = opened(context, link(server, token))
        for position, showing in enumerate(order(server.panel, rater)):
            if position == 4:  # come back another day, on another device
                context.close()
                context = browser.new_context(**settings)
                page = opened(context, link(server, token))
                assert page.evaluate("state.position") == 4
            watch(page)
            give(page, vote_of(server, showing, rater))
            wait_for_next(page, position)
        assert page.locator("#endtitle").inner_text() in ("Thank you!", "谢谢\uff01")
        context.close()
    mos = server.folder.parent / "mos.json"
    run(Config(panel=server.folder, mos=mos), "conclude")
    found = json.loads(mos.read_text(encoding="utf-8"))
    assert found["num_raters"] == {"invited": 5, "finished": 5, "kept": 5}
    for row in found["items"]:
        place = ROWS[row["system"]][server.panel.sources.index(row["source"])]
        for scale in SCALES:
            assert row[scale]["mos"] == pytest.approx(GOLDEN["mos"][place], abs=1e-4)
            assert row[scale]["ci95_half_width"] == pytest.approx(GOLDEN["ci95_t_halfwidth"][place], abs=1e-4)
            assert row[scale]["standard_error_bias_removed"] == pytest.approx(
                GOLDEN["se_bias_removed"][place], abs=1e-4
            )
    biases = [[rater["bias"][scale] for rater in found["raters"]] for scale in SCALES]
    assert np.array(biases) == pytest.approx(np.array([GOLDEN["rater_bias"]] * 4), abs=1e-4)
    assert all(each.played_s >= 0.35 for each in server.log.ratings())


def test_nothing_can_be_voted_before_the_film_was_seen_whole(server: Server, context: BrowserContext) -> None:
    page = opened(context, link(server, server.log.invite(1, 0.0)[0]))
    page.keyboard.press("5")
    assert page.locator("fieldset:enabled, input:checked").count() == 0
    page.evaluate("film.currentTime = film.duration - 0.01")  # skip to the end
    until(page, "!film.seeking && film.currentTime < 0.3")
    page.locator("#play").click()
    page.locator("fieldset:enabled").first.wait_for()
    assert page.evaluate("watched") >= 0.35
    assert page.locator("#submit").is_disabled()
    for _ in SCALES[1:]:
        page.keyboard.press("4")
    page.keyboard.press("Enter")
    assert page.locator("#submit").is_disabled()
    assert not server.log.ratings()


def test_a_page_that_was_cheated_is_refused_by_the_server(server: Server, context: BrowserContext) -> None:
    page = opened(context, link(server, server.log.invite(1, 0.0)[0]))
    watch(page)
    page.evaluate("watched = 0.1")
    by_mouse(page, 3)
    page.get_by_text("please watch the film again").wait_for()
    assert page.locator("fieldset:enabled").count() == 0
    watch(page)
    page.keyboard.press("Enter")
    wait_for_next(page, 0)
    assert [each.votes for each in server.log.ratings()] == [(3, 3, 3, 3)]


def test_without_a_network_a_vote_waits_on_the_page_and_is_kept_once(server: Server, context: BrowserContext) -> None:
    page = opened(context, link(server, server.log.invite(1, 0.0)[0]))
    watch(page)
    context.set_offline(True)
    by_mouse(page, 2)
    page.get_by_text("The server does not answer").wait_for()
    context.set_offline(False)
    page.locator("#submit").click()
    wait_for_next(page, 0)
    assert [each.votes for each in server.log.ratings()] == [(2, 2, 2, 2)]


def test_an_answer_that_is_lost_does_not_make_a_second_vote(server: Server, context: BrowserContext) -> None:
    page = opened(context, link(server, server.log.invite(1, 0.0)[0]))
    watch(page)

    def lose(route: Any) -> None:
        route.fetch()  # the server gets it, the page never hears
        route.abort()

    page.route("**/api/rating", lose, times=1)
    by_mouse(page, 5)
    page.get_by_text("The server does not answer").wait_for()
    assert len(server.log.ratings()) == 1
    page.locator("#submit").click()
    wait_for_next(page, 0)
    assert [(each.position, each.votes) for each in server.log.ratings()] == [(0, (5, 5, 5, 5))]


@pytest.mark.parametrize(
    ("fragment", "said"), [("", "This link is not complete"), ("#nobody", "This invitation is not known")]
)
def test_wrong_links_are_answered_kindly(server: Server, context: BrowserContext, fragment: str, said: str) -> None:
    page = context.new_page()
    page.goto(link(server, "").rstrip("#") + fragment)
    page.get_by_text(said).wait_for()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE, {"width": 320, "height": 568}], ids=lambda size: size["width"])
@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
def test_page_fits_its_screen(
    server: Server, browser: Browser, tmp_path: Path, viewport: dict[str, int], locale: str
) -> None:
    context = browser.new_context(viewport=viewport, locale=locale)
    errors: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(link(server, server.log.invite(1, 0.0)[0]))
    page.locator("#start").wait_for()
    page.screenshot(path=tmp_path / "welcome.png")
    page.locator("#start").click()
    page.locator("#play").wait_for()
    watch(page)
    page.keyboard.press("4")
    page.screenshot(path=tmp_path / "rating.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for element in page.locator("button:visible, .choices label").all():
        box = element.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]
        assert box["height"] >= 44
    assert page.evaluate(
        "[...document.querySelectorAll('.choices label')].every(each => each.scrollWidth <= each.clientWidth)"
    )
    submit = page.locator("#submit").bounding_box()
    assert submit is not None
    if viewport["height"] > 600:  # nobody need scroll
        assert submit["y"] + submit["height"] <= viewport["height"]
    assert page.locator("html").get_attribute("lang") == ("zh-Hans" if locale == "zh-CN" else "en")
    assert pixels_of_film(page).std() > 20  # the film shows a bright block on a coloured ground
    assert not errors
    context.close()


def pixels_of_film(page: Page) -> np.ndarray:
    """What the screen shows where the film is, (H, W, 3)."""
    import cv2

    encoded = page.locator("#film").screenshot()
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None
    return picture


def test_page_names_no_system_source_or_file(server: Server, context: BrowserContext) -> None:
    seen: list[str] = []
    page = context.new_page()
    page.on("request", lambda request: seen.append(request.url))
    page.goto(link(server, server.log.invite(1, 0.0)[0]))
    page.locator("#start").click()
    page.locator("#play").wait_for()
    watch(page)
    text = "\n".join([*seen, page.content()])
    panel = read(server.folder)
    words = {"candidate", "champion", "reference", "anchor", RATINGS, str(server.folder)}
    words |= {value for item in panel.items for value in (item.name, item.source, item.sha256)}
    assert not [word for word in words if word in text]
