"""Requests that schemathesis makes up from the served description: none of them ends in a server error."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings

from tests.serving.edge import scripted

APP, _, _ = scripted(lambda _: "we go up", access_log=False)
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, config=CONFIG)


@SCHEMA.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_ends_in_a_server_error(case: schemathesis.Case) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    assert response.status_code != 422, "the framework's own errors are no error objects"
