"""What `import paceline` loads: models and drafters, and nothing of placement, of servers, or of the command line."""

from __future__ import annotations

import subprocess
import sys

UNWANTED = ("ray", "transformers", "typer", "rich", "yaml", "paceline.placement", "paceline.serving", "paceline.cli")


def test_the_package_is_imported_without_placement_servers_and_commands() -> None:
    code = f"import sys, paceline; print([m for m in sys.modules if m in {UNWANTED!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_models_file_is_planned_without_ray() -> None:
    code = "import sys, paceline.placement.planning.planner; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
