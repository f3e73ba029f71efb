"""The container file and systemd unit of examples/deploy, the wheel that both install, and the manifest for KubeRay.

Their commands are compared with the command line, their paths with the server's; images are not built here.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.main import get_group

from paceline.cli import serve
from paceline.serving.middleware import _OPEN_PATHS
from tests.serving.test_page import SOURCES

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "examples" / "deploy" / "paceline.service"
CONTAINER = ROOT / "examples" / "deploy" / "Containerfile"
MANIFEST = ROOT / "examples" / "kuberay" / "rayservice.yaml"
INSTRUCTIONS = frozenset(
    {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER"}
    | {"VOLUME", "WORKDIR"}
)


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def known() -> set[str]:
    """Options of `paceline serve`."""
    return {name for parameter in get_group(serve.app).commands["serve"].params for name in parameter.opts}


def instructions() -> list[tuple[str, str]]:
    """Instructions of the container file with their arguments."""
    lines = [line for line in CONTAINER.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def test_the_unit_starts_the_server_with_existing_options() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "paceline" and command == "serve"
    assert options(words) and options(words) <= known()
    assert words[words.index("--host") + 1] == "127.0.0.1", "without a key it listens to this machine alone"
    assert unit["Service"]["Restart"] == "on-failure" and unit["Service"]["KillSignal"] == "SIGTERM"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/paceline/bin/paceline", sys.executable))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert done.returncode == 0 and not said, done.stderr


def test_the_container_serves_as_a_user_with_options_and_paths_that_exist() -> None:
    found = dict(instructions())
    assert found.keys() <= INSTRUCTIONS and instructions()[0][0] == "FROM"
    program, command, *words = json.loads(found["ENTRYPOINT"])
    assert (program, command) == ("paceline", "serve") and options(words) <= known()
    assert options(json.loads(found["CMD"])) == {"--help"}
    assert found["USER"] == "paceline" and found["STOPSIGNAL"] == "SIGTERM"
    (path,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", found["HEALTHCHECK"])
    assert path in _OPEN_PATHS and "8000" in found["EXPOSE"]
    assert "PACELINE_CACHE=/cache" in found["ENV"] and found["VOLUME"] == "/cache"


@pytest.mark.full
def test_the_wheel_is_complete_and_runs_outside_the_repository(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if not name.startswith(("tests/", "docs/", "benchmarks/", "examples/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("paceline-*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    assert {"paceline/cli/main.py", "paceline/core/errors.py", "paceline/py.typed"} <= set(held)
    assert {f"paceline/serving/page/{name}" for name in SOURCES} <= set(held)
    assert not [name for name in held if name.startswith(("tests/", "examples/", "docs/"))]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import paceline; print(paceline.__file__, flush=True)\n"
    code += "from paceline.cli.main import app; app()"
    for arguments in (["--version"], ["list"], ["selftest", "--backend", "native"]):
        command = [sys.executable, "-c", code, str(tmp_path / "site"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].startswith(str(tmp_path / "site"))


def test_serve_accepts_what_the_manifest_deploys() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    config = ServeDeploySchema(**yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    (application,) = config.applications
    module, _, name = str(application.import_path).partition(":")
    assert callable(getattr(import_module(module), name))
    assert set(application.args) <= {"models", "instance", "api"}
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == 100 and '"neuron_cores\\": 24' in group["rayStartParams"]["resources"]
    listens = config.http_options.host
    assert listens != "127.0.0.1" and application.args["api"]["api_keys"], "who may be reached asks for a key"


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD names KubeRay's ray.io_rayservices.yaml")
def test_kubernetes_accepts_the_manifest() -> None:
    """Validation by the schema of KubeRay's v1, in which unknown keys are errors in this test."""
    definition = yaml.load(Path(os.environ["KUBERAY_CRD"]).read_text(), Loader=yaml.CSafeLoader)
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {}
    errors = jsonschema.Draft7Validator(schema).iter_errors(yaml.safe_load(MANIFEST.read_text()))
    assert [(list(error.path), error.message) for error in errors] == []


def strict(schema: Any) -> Any:
    """Kubernetes' dialect as JSON schema, without unknown keys."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if found.get("x-kubernetes-int-or-string"):
        found = {key: value for key, value in found.items() if key not in ("anyOf", "pattern")}
        found["type"] = ["integer", "string"]
    if found.get("type") == "object" and "properties" in found and "additionalProperties" not in found:
        found["additionalProperties"] = bool(found.get("x-kubernetes-preserve-unknown-fields", False))
    return found
