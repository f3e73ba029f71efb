"""Requests that schemathesis makes up from the served description: none of them ends in a server error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from paceline.serving.api import create_app
from paceline.serving.lifecycle import ModelLifecycle
from paceline.serving.model_server import LocalRouter
from paceline.serving.settings import ApiSettings
from tests.decoder.tiny import Workshop
from tests.serving.test_lifecycle import PlannedLoader, Service, service

KEY = "k"
NAMES = ("kept", "late", "nobody")  # of which the last one is not served
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
DESCRIBED = create_app(LocalRouter({}), ApiSettings(), ModelLifecycle(PlannedLoader([]), {}))
SCHEMA = schemathesis.openapi.from_dict(DESCRIBED.openapi(), config=CONFIG)


@SCHEMA.hook
def map_body(context: object, body: Any) -> Any:
    """Most requests are for a model that is served: a name that is made up has the same answer every time."""
    if isinstance(body, dict) and isinstance(name := body.get("model"), str):
        body["model"] = NAMES[len(name) % len(NAMES)]
    return body


@pytest.fixture(scope="module")
def served(workshop: Workshop) -> Iterator[Service]:
    models = {"name": "kept", "n_positions": 4096}, {"name": "late", "load": "on_demand"}
    with service(workshop.checkpoint(), *models, key=KEY, api_keys=(KEY,), access_log=False) as made:
        yield made


@SCHEMA.parametrize()
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_no_request_ends_in_a_server_error(case: schemathesis.Case, served: Service) -> None:
    """503 is the answer of a model that an operator has unloaded, which such requests do, too."""
    response = case.call(base_url=served.address, headers={"authorization": f"Bearer {KEY}"})
    assert response.status_code < 500 or _is_told(response), response.text
    assert response.status_code != 422, "the framework's own errors are no error objects"


def _is_told(response: Any) -> bool:
    """Whether a client learns that it may ask again."""
    return response.status_code == 503 and "retry-after" in response.headers and "error" in response.json()
