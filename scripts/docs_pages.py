"""MkDocs hooks: pages that are not files in docs/. Run by `make docs`, nowhere else.

The API reference has one page for each package, written from the modules found. CHANGELOG and its like are taken from
the root of the repository; links between them and docs/ work on GitHub as they stand, and are turned here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs_generated import generated
from layout import LAYOUT, ROOT, lay_out
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")


def packages() -> dict[str, Path]:
    """Every package, with its folder below `LAYOUT`."""
    folders = sorted(init.parent for init in LAYOUT.rglob("__init__.py"))
    return {".".join(folder.relative_to(LAYOUT).parts): folder for folder in folders}


def modules(package: str, folder: Path) -> list[str]:
    """The package and its public modules that say what they are, by dotted name."""
    files = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")]
    return [package, *(f"{package}.{path.stem}" for path in files if ast.get_docstring(ast.parse(path.read_text())))]


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the sources, and list the pages of the reference.

    It runs before mkdocstrings' own hook, which keeps only those of its paths that exist by then.
    """
    lay_out()
    assert config.nav is not None
    for section in config.nav:
        if section.get("API"):
            section["API"] = [{name: f"api/{name}.md"} for name in packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference and the pages of the repository's root."""
    for name, folder in packages().items():
        blocks = [f"# {name}\n"]
        for module in modules(name, folder):
            options = "" if module == name else "\n    options: {show_root_toc_entry: true}"
            blocks.append(f"::: {module}{options}\n")
        files.append(File.generated(config, f"api/{name}.md", content="\n".join(blocks)))
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Generated parts, and links between docs/ and the root as in the built site, where both are one folder."""
    markdown = generated(markdown)
    if page.file.src_uri in ROOT_PAGES:
        return re.sub(r"(\]\()docs/", r"\1", markdown)
    return re.sub(r"(\]\()\.\./(?=(\.\./)*[A-Z]+(\.md)?\))", r"\1", markdown)
