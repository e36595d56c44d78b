"""schemathesis checks the endpoints against their OpenAPI document, with valid and invalid bodies."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from sidestream.runtime.gateway.api.pages import ENDPOINTS, Endpoint
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.settings import GatewaySettings
from support.gateway import FakeEngines

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
BODIES = [each for each in ENDPOINTS if each.request_body]
FEW, CASES, MANY = 2, 15, 10_000 // len(BODIES) + 1
SAME_BODIES = ("/batch", "/render")  # their bodies are those of other endpoints
ENGINES = FakeEngines()
ENGINES.context = 16
APP = build_app(ENGINES, NoAuth(), CompositeObserver(Metrics()), GatewaySettings(allowed_hosts=["*"]))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.mark.parametrize("endpoint", BODIES, ids=lambda each: each.path)
def test_no_case_is_a_server_error_or_breaks_the_document(endpoint: Endpoint, pytestconfig: pytest.Config) -> None:
    operation = SCHEMA[endpoint.path][endpoint.method.upper()]
    good, bad = (operation.as_strategy(mode) for mode in GenerationMode)
    usual = FEW if endpoint.path.endswith(SAME_BODIES) else CASES
    count = MANY if pytestconfig.getoption("--exhaustive") else usual
    cases = 0

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(case=good | bad)
    def tried(case: schemathesis.Case) -> None:
        nonlocal cases
        cases += 1
        case.call_and_validate(checks=CHECKS)

    tried()
    assert cases >= count, "no body was left to generate"
