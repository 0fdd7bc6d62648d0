"""Bodies made from the OpenAPI description, valid and broken ones, by schemathesis: none of them may end in a 500."""

import pytest
from api_server import ApiServer
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.generation import GenerationMode  # noqa: E402

# per operation and mode
EXAMPLES = 8


@pytest.fixture(scope="module")
def server():
    made = ApiServer()
    yield made
    made.close()


def test_the_description_is_served_and_names_every_endpoint(server):
    document = server.request("/openapi.json").json
    assert document["openapi"].startswith("3.1") and "/v1/chat/completions" in document["paths"]
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"] and chat["properties"]["max_tokens"]


def statuses(operation, mode) -> list[int]:
    """What bodies made for one operation were answered with."""
    seen: list[int] = []

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        answer = case.call(timeout=30)
        seen.append(answer.status_code)
        assert answer.status_code < 500, (case.body, answer.content[:500])
        if answer.status_code >= 400:
            assert isinstance(answer.json()["error"]["message"], str)

    run()
    return seen


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "broken"])
def test_no_body_ends_in_an_error_of_ours(server, mode):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 13
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method.lower() == "get":
            continue
        seen = statuses(operation, mode)
        assert len(seen) >= 1
        if mode is GenerationMode.NEGATIVE:
            assert all(status in (400, 401, 404, 405, 415) for status in seen), (operation.path, seen)
