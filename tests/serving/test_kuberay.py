"""The manifest for KubeRay, by Ray's schema, and by KubeRay's where that is given: it is in no package."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

MANIFEST = Path(__file__).parents[2] / "examples" / "kuberay" / "rayservice.yaml"


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
    """By the schema of KubeRay's v1, in which unknown keys are errors here."""
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
