"""Effects of `import paceline`: nothing of other packages, placement, servers or the command line, and no socket; and
its names, which are imported when they are used.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from tests.house.test_structure import REPOSITORY, structure

UNWANTED = (
    *("torch", "ray", "transformers", "typer", "rich", "yaml"),
    *("socketserver", "http.server", "asyncio.base_events", "uvicorn", "fastapi", "starlette", "grpc"),
    *("paceline.placement", "paceline.serving", "paceline.cli"),
)
WATCHED_IMPORT = f"""
import sys
before, seen = set(sys.modules), []
sys.addaudithook(lambda event, arguments: seen.append(event) if event.startswith("socket.") else None)
import paceline
print([name for name in sys.modules if name in {UNWANTED!r} and name not in before], seen)
"""


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_package_is_imported_without_placement_servers_commands_and_sockets() -> None:
    assert printed(WATCHED_IMPORT) == "[] []\n"


def test_the_import_check_detects_a_socket(tmp_path: Path) -> None:
    (tmp_path / "paceline.py").write_text("import socket, socketserver\nsocket.socket().bind(('127.0.0.1', 0))\n")
    seen = printed(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WATCHED_IMPORT}")
    assert seen.startswith("['socketserver'] [") and "'socket.bind'" in seen


def test_every_public_name_is_importable() -> None:
    assert set(paceline.__all__) <= set(dir(paceline)) and all(hasattr(paceline, name) for name in paceline.__all__)
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'Nothing'"):
        _ = paceline.Nothing  # type: ignore[attr-defined]


def test_type_checkers_find_every_name() -> None:
    tree = ast.parse((REPOSITORY / "orchestrator" / "__init__.py").read_text())
    told = {one.name for one in structure.imports_of(tree) if one.name.startswith("paceline.")}
    assert told == {f"paceline.{module}.{name}" for name, module in paceline._MODULE_OF.items()}
    assert sorted(paceline._MODULE_OF) == sorted(paceline.__all__)


def test_decoding_on_cpus_imports_nothing_of_neuron() -> None:
    parts = "generator, auto, auto_drafter, medusa.drafter, eagle.drafter, decoder.backends.native, serving.api"
    imported = ", ".join(f"paceline.{part}" for part in parts.split(", "))
    assert printed(f"import sys, {imported}; print([x for x in sys.modules if 'neuron' in x])") == "[]\n"
