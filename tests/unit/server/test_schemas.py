"""Nothing that the described API allows to be asked, or does not, is an error of the server."""

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import BaseSchema, GenerationMode
from schemathesis.checks import not_a_server_error

from regard.server.app import create_app
from regard.server.settings import Settings
from regard.storage.run_dir import RunDir
from regard.tasks import Translator


@pytest.fixture(scope="module")
def api(finished_run: Path) -> BaseSchema:
    model = Translator.load(finished_run)
    short = model.recipe.decoding.model_copy(
        update={"extra_length": 2}
    )  # it knows no end, and goes on
    model.recipe = model.recipe.model_copy(update={"search": short})
    app = create_app(model, Settings(batch_wait=0.0), RunDir(finished_run).card())
    return schemathesis.openapi.from_asgi("/openapi.json", app)


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
POSTS = [
    "/translate",
    "/detect",
    "/v1/translate/stream",
    "/v1/trace",
    "/v1/align",
    "/v1/live",
]
GETS = [
    "/languages",
    "/frontend/settings",
    "/v1/info",
    "/v1/run",
    "/v1/run/curves",
    "/health",
    "/ready",
    "/metrics",
]
KEPT = ["/v1/trace/{id}/{place}/{layer}", "/v1/trace/{id}/{place}/{layer}/{part}"]
EXAMPLES = 90
"""of each mode of each of the six that take any: more than a thousand"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", POSTS)
def test_nothing_that_can_be_asked_is_an_error_of_the_server(
    api: BaseSchema, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(api[path]["POST"].as_strategy(generation_mode=mode))
    def test(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=[not_a_server_error])

    test()


@pytest.mark.parametrize("path", KEPT)
def test_what_is_not_kept_is_not_found(api: BaseSchema, path: str) -> None:
    @settings(max_examples=EXAMPLES // 4, suppress_health_check=list(HealthCheck))
    @given(api[path]["GET"].as_strategy())
    def test(case: schemathesis.Case[Any]) -> None:
        assert case.call().status_code == 404

    test()


def test_what_is_described_is_what_there_is(api: BaseSchema) -> None:
    paths = api.raw_schema["paths"]
    found = {(path, method) for path, methods in paths.items() for method in methods}
    gets = {(path, "get") for path in [*GETS, *KEPT]}
    assert found == {(path, "post") for path in POSTS} | gets
    for path in GETS:
        api[path]["GET"].Case().call_and_validate()
