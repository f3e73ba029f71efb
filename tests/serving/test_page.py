"""The page at /, in a real Chromium that has no screen: it streams, colours tokens, compares, and shows the chip."""

from __future__ import annotations

import re
from pathlib import Path

from tests.serving.browser import browser
from tests.serving.edge import running, scripted


def page(folder: Path, address: str) -> str:
    """The page as the browser has it when the run that its address asks for is over."""
    with browser(folder) as chromium:
        chromium.open(address)
        state = "(document.getElementById('state') || {}).innerText"
        chromium.wait_for(f"/done|requests wait/.test({state})")
        html = chromium.value("document.documentElement.outerHTML")
        assert isinstance(html, str)
        return html


def spans(html: str, panel: str) -> list[tuple[str, str]]:
    """(origin, text) of the tokens in a panel."""
    inside = html[html.index(f'id="{panel}"') :].split("</section>")[0]
    return re.findall(r'<span class="(draft|corrected|target)">([^<]*)</span>', inside)


def test_tokens_stream_in_colours_beside_plain(tmp_path: Path) -> None:
    app, engine, _ = scripted(lambda _: "we go up & up, the cat sat on the mat")
    with running(app) as address:
        html = page(tmp_path, f"{address}/?prompt=x&tokens=64&run")
    found = {name: spans(html, name) for name in ("speculative", "plain")}
    assert "".join(text for _, text in found["speculative"]) == "we go up &amp; up, the cat sat on the mat"
    assert {origin for origin, _ in found["speculative"]} == {"draft", "corrected", "target"}
    assert [text for _, text in found["plain"]] == [text for _, text in found["speculative"]]
    assert "Identical text; " in html and "\u03c4 = " in html and html.count('class="bar"') == 3
    assert [call.requests[0].use_speculation for call in engine.calls] == [True, False]
    assert len({call.requests[0].sampling.seed for call in engine.calls}) == 1
    assert re.findall(r'title="(\w+ \(\w+\))"', html) == ["m (target)", "m (target)", "d (draft)"]


def test_an_error_is_shown_in_its_words(tmp_path: Path) -> None:
    app, engine, _ = scripted(lambda _: "yes")
    engine.full = True
    with running(app) as address:
        assert "4 requests wait" in page(tmp_path, f"{address}/?prompt=x&run")


def test_the_page_asks_nobody_else() -> None:
    import paceline.serving

    text = (Path(paceline.serving.__file__).parent / "page.html").read_text(encoding="utf-8")
    assert "http" not in re.sub(r'"HTTP |http-equiv', "", text)
