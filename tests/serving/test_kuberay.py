"""The manifest for KubeRay: what Ray's own schema can check of it. That of KubeRay is in no package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

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
