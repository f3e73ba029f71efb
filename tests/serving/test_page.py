"""The page's files: served without a key, under a strict policy, and without anything from elsewhere.

What a reader can do with it is in test_page_browser.py.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import httpx2 as httpx
import pytest

from paceline.serving.page import PATHS
from tests.serving.edge import running, scripted

SOURCES = {one.name: one for one in files("paceline.serving.page").iterdir() if Path(one.name).suffix in
           {".html", ".css", ".js", ".svg"}}  # fmt: skip


def test_every_file_is_served_without_a_key_under_the_policy() -> None:
    app, _, _ = scripted(lambda _: "yes", api_keys=("key",))
    assert {path.removeprefix("/page/") for path in PATHS} == SOURCES.keys() - {"page.html"} | {"/"}
    with running(app) as address, httpx.Client(base_url=address) as client:
        for path in sorted(PATHS):
            response = client.get(path)
            source = SOURCES["page.html" if path == "/" else path.removeprefix("/page/")]
            assert (response.status_code, response.content) == (200, source.read_bytes())
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        assert client.get("/page/__init__.py").status_code == 401
    assert not any(path.startswith("/page") for path in app.openapi()["paths"])


def test_the_page_can_be_disabled() -> None:
    app, _, _ = scripted(lambda _: "yes", page=False)
    with running(app) as address:
        assert {httpx.get(address + path).status_code for path in PATHS} == {404}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_page_loads_nothing_external_and_parses_no_markup(name: str) -> None:
    text = SOURCES[name].read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"""["'(]\s*(https?:)?//\w""", text), "an address of another machine"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if name.endswith(".html"):
        assert not re.search(r"<script>|<style>|\son\w+=|\sstyle=", text), "the policy forbids what is inline"
    for asset in re.findall(r"(?:from|import) \"\./([\w.]+)\"", text):
        assert f"/page/{asset}" in PATHS
