"""Links between pages, and from pages to files, lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, prose


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        place = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not place.exists() or (anchor and anchor not in anchors(place.relative_to(ROOT).as_posix())):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    listed = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose("docs/index.md"))}
    pages = {page.removeprefix("docs/") for page in PAGES if re.fullmatch(r"docs/(extending/)?[^/]+\.md", page)}
    assert pages - listed == {"index.md"}
