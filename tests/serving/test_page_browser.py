"""The page at / in a real Chromium without a screen: chat, tokens, stop, race, models, phone, dark, keyboard.

Playwright is in an environment of its own, which `make test-page` makes; Chromium is the machine's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.serving.api import create_app
from paceline.serving.lifecycle import ModelState
from paceline.serving.model_server import LocalRouter
from paceline.serving.settings import ApiSettings
from tests.serving.edge import ScriptedEngine, running, scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.page

SAYS = "We go **up & up**, the `cat` sat on the mat."
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\n\n"
    "[a](javascript:window.hacked=3) <b onclick=x>bold</b> ![i](http://127.0.0.1:9/x.png)\n\n"
    "```html\n<script>window.hacked = 4</script>\n```\n\n- <svg onload=x>\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="there is no Playwright; `make test-page` installs it")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on the PATH; install the package of that name")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@contextmanager
def opened(browser: Browser, address: str, errors: Sequence[str] = (), **options: Any) -> Iterator[Page]:
    """The page, in a separate profile. ``errors``: words of messages on the console that are expected."""
    context = browser.new_context(**options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page, seen = context.new_page(), list[str]()
    page.set_default_timeout(60_000)
    page.on("console", lambda message: seen.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(address) else seen.append(request.url))
    page.goto(address)
    wait_for(page, "document.getElementById('model').options.length || document.querySelector('#notice.error')")
    yield page
    context.close()
    assert not [one for one in seen if not any(word in one for word in errors)], seen


@pytest.fixture
def served() -> Iterator[tuple[str, ScriptedEngine]]:
    long = "words and words " * 100
    app, engine, _ = scripted(lambda prompt: HOSTILE if "hostile" in prompt else long if "slow" in prompt else SAYS)
    with running(app) as address:
        yield address, engine


def wait_for(page: Page, expression: str) -> None:
    """Wait until it is true. Playwright's own `wait_for_function` needs what the page's policy forbids."""
    for _ in range(1200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}\n{page.inner_text('body')}")


def ask(page: Page, text: str) -> Locator:
    """Send a message; return the answer when it is complete."""
    page.fill("#input", text)
    page.press("#input", "Enter")
    page.wait_for_selector("#stop", state="hidden")
    page.wait_for_selector(".message.assistant:last-child .figures", state="attached")
    return page.locator(".message.assistant").last.locator(".answer")


def sentence(answer: Locator) -> str:
    return answer.inner_text().strip()


def test_a_chat_shows_who_wrote_each_token(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    with opened(browser, address) as page:
        answer = ask(page, "first")
        assert sentence(answer) == "We go up & up, the cat sat on the mat."
        assert answer.locator("strong").inner_text() == "up & up" and answer.locator("code").inner_text() == "cat"
        origins = ("draft", "corrected", "target")
        assert all(answer.locator(f".token.{origin}").count() for origin in origins)
        answer.locator(".token.corrected").first.hover()
        about = page.locator("#about")
        assert "Drafted instead: " in about.inner_text() and about.locator("tr").count() == 5
        assert about.locator("tr.taken").inner_text().endswith("60.7 %")
        figures = page.locator("#figures").inner_text()
        assert "tokens/s" in figures and "2.89 tokens per round" in figures
        assert page.locator("#bars .place").all_inner_texts()[0].startswith("100 %")
        ask(page, "second")
        assert engine.calls[-1].requests[0].num_logprobs == 5
        prompt = engine.tokenizer.decode(list(engine.calls[-1].requests[0].prompt))
        assert prompt == f"[user]first[assistant]{SAYS}[user]second[assistant]"
        page.uncheck("#colours")
        assert not page.locator(".coloured").count()
        page.reload()
        assert page.locator(".message").count() == 4 and sentence(page.locator(".answer").last) == sentence(answer)
        page.click("#new-chat")
        assert page.locator(".message").count() == 0
        page.click("#chats .open:text('first')")
        assert page.locator(".message").count() == 4
        page.click("[aria-label='Delete first']")
        page.reload()
        assert page.locator(".message").count() == 0


def test_chats_of_two_tabs_are_kept(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    with opened(browser, served[0]) as first:
        second = first.context.new_page()
        second.goto(served[0])
        wait_for(second, "document.getElementById('model').options.length")
        for page, text in ((first, "one"), (second, "two"), (first, "again")):
            ask(page, text)
        titles = [page.locator("#chats .open").all_inner_texts() for page in (first, second)]
        assert sorted(titles[0]) == sorted(titles[1]) == ["one", "two"]
        second.click("[aria-label='Delete two']")
        first.reload()
        assert first.locator("#chats .open").all_inner_texts() == ["one"] and first.locator(".message").count() == 4


def test_markup_of_an_answer_is_inert(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    with opened(browser, served[0]) as page:
        answer = ask(page, "hostile")
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        assert not answer.locator("script, img, svg, b, [onclick], a[href^='javascript']").count()
        assert "<script>window.hacked = 1</script><img src=x" in answer.inner_text()
        assert answer.locator("pre code").inner_text().strip() == "<script>window.hacked = 4</script>"
        assert answer.locator("li").all_inner_texts() == ["<svg onload=x>", "two"]
        assert answer.locator("td").all_inner_texts() == ["1", "2"]
        assert answer.locator("a").get_attribute("rel") == "noopener noreferrer nofollow"
        answer.locator(".copy-code").click()
        assert page.evaluate("navigator.clipboard.readText()").strip() == "<script>window.hacked = 4</script>"
        page.locator(".message.assistant .tools >> text=Copy").click()
        assert page.evaluate("navigator.clipboard.readText()") == HOSTILE


MARKDOWN = {
    "a *b* **c _d_** ~~e~~ `f*g*`": "<p>a <em>b</em> <strong>c <em>d</em></strong> <del>e</del> <code>f*g*</code></p>",
    "snake_case_name, 2 * 3 * 4, **open": "<p>snake_case_name, 2 * 3 * 4, **open</p>",
    "\\*plain\\* a\nb": "<p>*plain* a<br>b</p>",
    "# One\ntwo\n\n---\n### Three": "<h1>One</h1><p>two</p><hr><h3>Three</h3>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "3. a\n\n4. b\n   - c\n   - d\n\nend": (
        '<ol start="3"><li>a</li><li><p>b</p><ul><li>c</li><li>d</li></ul></li></ol><p>end</p>'
    ),
    "| a | b |\n|---|:-:|\n| 1 | `2` |\n": (
        "<table><tr><th> a </th><th> b </th></tr><tr><td> 1 </td><td> <code>2</code> </td></tr></table>"
    ),
}


def test_markdown_becomes_elements(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    script = """async sources => {
      const { renderMarkdown } = await import("./page/markdown.js");
      return sources.map(source => {
        const made = document.createElement("div");
        renderMarkdown(made, source, (parent, start, end) => parent.append(source.slice(start, end)));
        return made.innerHTML;
      });
    }"""
    with opened(browser, served[0]) as page:
        found = page.evaluate(script, list(MARKDOWN))
        assert dict(zip(MARKDOWN, found, strict=True)) == MARKDOWN


def test_stop_regenerate_and_edit(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    with opened(browser, address) as page:
        engine.pause_s = 0.2
        page.fill("#input", "slow")
        page.press("#input", "Enter")
        page.wait_for_selector(".answer .token")
        page.click("#stop")
        page.wait_for_selector(".message.assistant >> text=Stopped.")
        kept = page.locator(".answer").inner_text()
        assert kept and len(kept) < 1600
        engine.pause_s = 0.0
        page.click("text=Regenerate")
        wait_for(page, "document.querySelector('.answer').innerText.length === 1599")
        page.wait_for_selector("#stop", state="hidden")
        assert page.locator(".message").count() == 2
        first, second = (call.requests[0] for call in engine.calls)
        assert first.prompt == second.prompt and first.sampling.seed != second.sampling.seed
        page.press("#input", "ArrowUp")
        page.fill("[aria-label='Edit the message']", "other")
        page.press("[aria-label='Edit the message']", "Enter")
        wait_for(page, "document.querySelector('.message.user .text').innerText === 'other'")
        page.wait_for_selector("#stop", state="hidden")
        assert engine.tokenizer.decode(list(engine.calls[-1].requests[0].prompt)) == "[user]other[assistant]"


def test_parameters_reach_the_engine(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    with opened(browser, address) as page:
        page.click("#open-parameters")
        given = {"system": "be brief", "temperature": "0.5", "top_k": "7", "max_tokens": "6", "seed": "11", "k": "2"}
        for name, value in given.items():
            page.fill(f"#{name}", value)
        page.uncheck("#inspect")
        page.press("#k", "Escape")
        ask(page, "x")
        (request,) = engine.calls[-1].requests
        assert engine.tokenizer.decode(list(request.prompt)) == "[system]be brief[user]x[assistant]"
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 7, 11)
        assert (request.max_draft_tokens, request.num_logprobs) == (2, None)
        assert request.max_length - len(request.prompt) == 6
        page.reload()
        assert page.input_value("#temperature") == "0.5" and page.input_value("#system") == "be brief"


def test_a_race_runs_in_turn_and_replays_equal_texts(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    with opened(browser, address) as page:
        page.click("#view-race")
        page.fill("#race-prompt", "go")
        page.click("#lanes-offered label:has-text('at most 2')")
        page.click("#race-start")
        page.wait_for_selector("#verdict:text('First:')")
        assert page.locator("#verdict").inner_text().startswith("All texts are equal")
        texts = page.locator(".lane .text").all_inner_texts()
        assert texts == [SAYS] * 5
        requests = [call.requests[0] for call in engine.calls]
        warm = [replace(one, max_length=requests[0].max_length) for one in requests[1::2]]
        assert requests[::2] == warm, "a short run before each"
        asked = [(one.use_speculation, one.drafter, one.max_draft_tokens) for one in requests[1::2]]
        assert asked == [
            *((False, None, None), (True, None, None), (True, "draft", None), (True, "ngram", None), (True, None, 2))
        ]
        assert len({one.sampling.seed for one in requests}) == 1
        assert all("x plain" in text for text in page.locator(".lane .quiet").all_inner_texts())
        page.click("#race-replay")
        page.wait_for_selector("#verdict:text('First:')")
        assert len(engine.calls) == 10


class TwoModels:
    """A lifecycle of a model that is loaded, and one that can be."""

    def __init__(self) -> None:
        self.second = "unloaded"

    async def states(self) -> Sequence[ModelState]:
        first = ModelState("m", "loaded", "eager", True, True, 0, 0.0, None)
        return first, replace(first, name="late", state=self.second, pinned=False)  # type: ignore[arg-type]

    async def load(self, name: str) -> ModelState:
        self.second = "loaded"
        return (await self.states())[1]

    async def unload(self, name: str) -> ModelState:
        self.second = "unloaded"
        return (await self.states())[1]

    async def restore(self) -> None: ...

    async def watch(self) -> None: ...


def test_models_are_loaded_with_their_cores_shown(browser: Browser) -> None:
    _, _, server = scripted(lambda _: SAYS)
    app = create_app(LocalRouter({"m": server}), ApiSettings(), TwoModels())  # type: ignore[arg-type]
    with running(app) as address, opened(browser, address) as page:
        page.click("#open-models")
        late = page.locator("#model-list li", has_text="late")
        page.wait_for_selector("#model-list >> text=the best of draft, ngram, up to 3 tokens per round")
        late.locator("text=State: unloaded").wait_for()
        assert page.locator("[aria-label='Unload m']").is_disabled()
        page.click("[aria-label='Load late']")
        late.locator("text=State: loaded").wait_for()
        page.click("[aria-label='Unload late']")
        late.locator("text=State: unloaded").wait_for()
        assert page.locator("#cores .node").all_inner_texts() == ["kitchen"]
        labels = [cell.get_attribute("aria-label") for cell in page.locator("#cores .cores li").all()]
        assert labels == ["Core 0: m (target)", "Core 1: m (target)", "Core 2: d (draft)"]


def test_the_key_stays_in_memory(browser: Browser) -> None:
    app, _, _ = scripted(lambda _: SAYS, api_keys=("secret-key",))
    with running(app) as address, opened(browser, address, errors=("401",)) as page:
        page.wait_for_selector("text=This server needs an API key")
        page.click("#open-parameters")
        page.fill("#key", "secret-key")
        page.press("#key", "Tab")
        wait_for(page, "document.getElementById('model').options.length")
        page.press("#key", "Escape")
        ask(page, "x")
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert "secret-key" not in kept and "mat" in kept
        page.reload()
        page.wait_for_selector("text=This server needs an API key")


def test_an_error_message_is_shown(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    engine.full = True
    with opened(browser, address, errors=("429",)) as page:
        ask(page, "x")
        assert "4 requests wait" in page.locator(".message.assistant .error").inner_text()


SQUEEZED = """() => {
  const [verdict, lanes] = ["verdict", "lanes"].map(id => document.getElementById(id));
  verdict.textContent = "word ".repeat(40);
  lanes.style.height = "2000px";
  return verdict.scrollHeight - verdict.clientHeight;
}"""


def test_the_page_fits_a_phone(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    with opened(browser, served[0], viewport={"width": 360, "height": 640}, has_touch=True) as page:
        ask(page, "hostile")
        page.click("#open-history")
        assert page.locator("#chats .open").first.is_visible()
        page.click("#chats .open")
        assert not page.locator("#chats").is_visible()
        for view in ("#view-race", "#view-chat"):
            page.click(view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            if view == "#view-race":
                assert page.evaluate(SQUEEZED) <= 0, "a verdict of several lines is above the lanes"
        assert page.locator("#send").bounding_box()["y"] < 640  # type: ignore[index]


CONTRAST = """() => {
  const channel = value => { value /= 255; return value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const ground = one => {
    for (; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.checkVisibility() || one.matches("option, :disabled")) continue;
    const pair = [light(numbers(getComputedStyle(one).color)), light(ground(one))].sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    if (ratio < 4.5) poor.push(`${one.tagName}.${one.className} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_suffices_in_both_themes(browser: Browser, served: tuple[str, ScriptedEngine], scheme: str) -> None:
    with opened(browser, served[0], errors=("404",), color_scheme=scheme) as page:
        ask(page, "hostile")
        ground = "getComputedStyle(document.body).backgroundColor"
        first = page.evaluate(ground)
        assert (first == "rgb(13, 17, 23)") == (scheme == "dark")
        for dialog in (None, "#open-parameters", "#open-models"):
            if dialog:
                page.click(dialog)
            assert page.evaluate(CONTRAST) == []
            page.keyboard.press("Escape")
        for _ in range(2 if scheme == "light" else 1):  # system, light, dark
            page.click("#theme")
        assert page.evaluate(ground) != first
        page.reload()
        assert page.evaluate(ground) != first


NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex]")].filter(one => {
  const labels = one.labels ? [...one.labels].map(label => label.innerText).join("") : "";
  return !(one.innerText.trim() || labels.trim() || one.getAttribute("aria-label"));
}).map(one => one.outerHTML)"""


def test_everything_can_be_done_with_the_keyboard(browser: Browser, served: tuple[str, ScriptedEngine]) -> None:
    address, engine = served
    with opened(browser, address) as page:
        answer = ask(page, "first")
        assert page.evaluate(NAMELESS) == []
        answer.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator("#about").is_visible() and answer.locator(".chosen").count() == 1
        page.keyboard.press("Escape")
        assert not page.locator("#about").is_visible()
        reached = set()
        page.evaluate("document.activeElement.blur()")
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
        assert {"view-race", "model", "open-parameters", "open-models", "theme", "input", "colours", "send"} <= reached
        page.focus("#open-parameters")
        page.keyboard.press("Enter")
        assert page.locator("#parameters").is_visible()
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "open-parameters"
        engine.pause_s = 0.2
        page.fill("#input", "slow")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message:last-child .token")
        page.keyboard.press("Escape")
        page.wait_for_selector("text=Stopped.")
