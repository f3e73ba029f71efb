"""The recipes of docs/neuron.md resolve: pip itself, over wheels without files made from a recorded index.

`package_index.json` holds names, versions and Pythons of the real packages, with sources and dates.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = json.loads((Path(__file__).parent / "package_index.json").read_text())["packages"]


def wheel(folder: Path, name: str, version: str, *, tag: str = "py3", metadata: str = "") -> None:
    """A wheel that holds its own description and nothing else."""
    stem = f"{re.sub(r'[-.]+', '_', name)}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-{tag}-none-any.whl", "w") as made:
        info = f"{stem}.dist-info"
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        made.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}-none-any\n")
        made.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for name, versions in INDEX.items():
        for one in versions:
            needs = f"Requires-Python: {one['python']}\n" if "python" in one else ""
            for tag in [f"cp{number}" for number in one.get("pythons", ())] or ["py3"]:
                wheel(folder, name, one["version"], tag=tag, metadata=needs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {x}" for x in project["dependencies"]),
    ]
    for extra, requirements in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {x}; extra == "{extra}"' for x in requirements)]
    wheel(folder, "paceline", project["version"], metadata="\n".join(lines) + "\n")
    return folder


def resolved(index: Path, python: str, *wanted: str) -> dict[str, str] | str:
    """Packages that pip would install for a Python, by name; its message if it finds nothing."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated", "install", "--dry-run"]
    command += ["--ignore-installed", "--no-index", "--find-links", str(index), "--python-version", python]
    command += ["--only-binary", ":all:", "--target", str(index / "nowhere"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Would install (.*)", done.stdout)
    if done.returncode or found is None:
        return done.stderr
    return dict(one.rsplit("-", 1) for one in found.group(1).replace("_", "-").split())


SDK_31 = {"torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.26.6360.0", "neuronx-distributed": "0.19.28492"}
SDK_33 = {"torch-neuronx": "2.13.3.0", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("extras", "python", "wanted"),
    [
        ("neuron", "3.11", SDK_31), ("neuron", "3.12", SDK_31), ("neuron-native", "3.12", SDK_33),
        ("neuron-native", "3.11", "No matching distribution found for torch-neuronx"),
        ("neuron,neuron-native", "3.12", "conflicting dependencies"),
    ],
)  # fmt: skip
def test_every_extra_pins_one_sdk(index: Path, extras: str, python: str, wanted: dict[str, str] | str) -> None:
    found = resolved(index, python, f"paceline[{extras}]")
    if isinstance(wanted, str):
        assert wanted in found
        return
    assert isinstance(found, dict), found
    assert wanted.items() <= found.items() and found["torch"].startswith("2.9." if extras == "neuron" else "2.13.")


def recipes() -> list[tuple[str, str]]:
    """Every `pip install` of the page with the Python of its environment."""
    found, python = [], ""
    for line in (ROOT / "docs" / "neuron.md").read_text().replace("\\\n", " ").splitlines():
        if made := re.search(r"python(3\.\d+) -m venv", line):
            python = made.group(1)
        elif line.startswith("    pip install"):
            found.append((python, line.strip()))
    return found


def test_the_page_has_a_recipe_for_each_backend_and_the_kept_line() -> None:
    text = " ".join(line for _, line in recipes())
    assert all(part in text for part in ('".[neuron]"', '".[neuron-native]"', "2.23.6484.0"))


@pytest.mark.parametrize(("python", "line"), recipes())
def test_a_recipe_of_the_page_resolves(index: Path, python: str, line: str) -> None:
    words, skip = [], False
    for word in shlex.split(line)[2:]:
        if skip or word == "-e":
            skip = False
        elif word == "--extra-index-url":
            skip = True
        else:
            words.append(re.sub(r"^\.(?=\[|$)", "paceline", word))
    found = resolved(index, python, *words)
    assert isinstance(found, dict) and {"paceline", "torch-neuronx", "neuronx-cc"} <= set(found), found
