"""The OpenAPI description: no request, valid or not, causes a server error."""

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import BaseSchema, GenerationMode
from schemathesis.checks import not_a_server_error

from regard.server.app import create_app
from regard.server.schemas import Settings
from regard.tasks import Translator


@pytest.fixture(scope="module")
def api(finished_run: Path) -> BaseSchema:
    model = Translator.load(finished_run, "cpu")
    short = model.recipe.decoding.model_copy(
        update={"extra_length": 2}
    )  # an untrained model rarely predicts EOS
    model.recipe = model.recipe.model_copy(update={"decoding": short})
    limits = Settings(batch_delay=0.0, allowed_hosts=("*",))
    app = create_app(model, limits)
    return schemathesis.openapi.from_asgi("/openapi.json", app)


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
POSTS = [
    "/translate",
    "/detect",
    "/v1/translate",
    "/v1/translate/stream",
    "/v1/trace",
    "/v1/align",
    "/v1/lens/architecture",
    "/v1/lens/depth",
    "/v1/lens/attribution",
    "/v1/lens/patching",
    "/v1/lens/heads",
    "/v1/live",
]
GETS = [
    "/languages",
    "/frontend/settings",
    "/v1/info",
    "/v1/run",
    "/v1/model",
    "/v1/lens/heads",
    "/v1/run/curves",
    "/health",
    "/ready",
    "/metrics",
]
CACHED = ["/v1/trace/{id}/{site}/{layer}", "/v1/trace/{id}/{site}/{layer}/{projection}"]
EXAMPLES = 90
"""for each mode of each of the six POST routes: more than a thousand in total"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", POSTS)
def test_no_request_causes_a_server_error(api: BaseSchema, path: str, mode: GenerationMode) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(api[path]["POST"].as_strategy(generation_mode=mode))
    def test(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=[not_a_server_error])

    test()


@pytest.mark.parametrize("path", CACHED)
def test_an_unknown_trace_is_not_found(api: BaseSchema, path: str) -> None:
    @settings(max_examples=EXAMPLES // 4, suppress_health_check=list(HealthCheck))
    @given(api[path]["GET"].as_strategy())
    def test(case: schemathesis.Case[Any]) -> None:
        assert case.call().status_code == 404

    test()


def test_the_description_lists_all_routes(api: BaseSchema) -> None:
    paths = api.raw_schema["paths"]
    described = {(path, method) for path, methods in paths.items() for method in methods}
    gets = {(path, "get") for path in [*GETS, *CACHED]}
    # Tested in test_document_uploads.py.
    files = {("/translate_file", "post"), ("/download_file/{name}", "get")}
    assert described == {(path, "post") for path in POSTS} | gets | files
    for path in GETS:
        api[path]["GET"].Case().call_and_validate()
