"""Keys, Host and Origin, hostile options and bodies, by the numbers of the conformance checks."""

import hmac
import json
import logging

import pytest
from api_server import ApiServer, tool

from tandem.errors import SettingError
from tandem.serve.app import AppSettings
from tandem.serve.security import Guard, check_exposure

KEYS = ("first-secret-key", "second-secret-key")


@pytest.fixture(scope="module")
def server():
    made = ApiServer(AppSettings(patience_s=0.05))
    yield made
    made.close()


@pytest.fixture(scope="module")
def locked():
    settings = AppSettings(
        api_keys=KEYS, allowed_origins=("https://app.example",), allowed_hosts=("box.local",), patience_s=0.05
    )
    made = ApiServer(settings)
    yield made
    made.close()


def test_check_37_every_path_but_health_needs_a_key(locked):
    assert locked.request("/health").status == 200 and locked.request("/ready").status in (200, 503)
    for path in ("/v1/models", "/props", "/openapi.json", "/nope", "/metrics"):
        assert locked.request(path).status == 401, path
    reply = locked.request("/v1/chat/completions", {"messages": []})
    assert (
        reply.status == 401
        and reply.error["type"] == "authentication_error"
        and reply.headers["www-authenticate"] == "Bearer"
    )
    assert locked.request("/v1/messages", {"messages": []}).error["type"] == "authentication_error"


@pytest.mark.parametrize("key", KEYS)
def test_check_37_both_headers_and_all_keys_are_read(locked, key):
    for headers in ({"Authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x_api_key": key}):
        assert locked.request("/v1/models", **headers).status == 200
    for headers in (
        {"Authorization": key},
        {"Authorization": f"Basic {key}"},
        {"Authorization": "Bearer "},
        {"x_api_key": key[:-1]},
    ):
        assert locked.request("/v1/models", **headers).status == 401


def test_check_37_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    guard = Guard(keys=("a" * 10, "b" * 20, "c" * 30))
    guard.check("/v1/models", {b"host": b"localhost", b"x-api-key": b"a" * 10})
    assert compared == [(32, 32)] * 3, "hashes of one length, and all of them though the first one matches"


def test_check_37_keys_are_in_no_log_and_no_text(locked, caplog):
    with caplog.at_level(logging.DEBUG):
        locked.request("/v1/models", Authorization="Bearer wrong-secret-key")
        locked.request("/v1/models", Authorization=f"Bearer {KEYS[0]}")
    assert "secret" not in caplog.text and "secret" not in repr(locked.app.settings)


def test_an_address_that_others_reach_needs_a_key():
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        check_exposure(host, ())
    for host in ("0.0.0.0", "::", "192.168.1.5", "box.local"):
        check_exposure(host, ("k",))
        with pytest.raises(SettingError, match="needs a key"):
            check_exposure(host, ())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "[::2]:80"]
)
def test_check_62_a_foreign_host_is_403(server, host):
    assert server.request("/v1/models", Host=host).status == 403
    assert server.request("/v1/chat/completions", {"messages": []}, Host=host).status == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:99", "127.0.0.1:1", "[::1]:80", "LOCALHOST"])
def test_check_62_known_hosts_are_served(server, host):
    assert server.request("/v1/models", Host=host).status == 200


def test_check_62_hosts_can_be_allowed(locked):
    assert locked.request("/health", Host="box.local:8080").status == 200
    assert locked.request("/health", Host="other.local").status == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil", "http://127.0.0.1:1", "file://"]
)
def test_check_62_a_foreign_origin_gets_nothing(server, origin):
    for method, headers in (("GET", {}), ("OPTIONS", {"Access_Control_Request_Method": "POST"})):
        reply = server.request("/v1/models", method=method, Origin=origin, **headers)
        assert reply.status == 403 and not [name for name in reply.headers if name.startswith("access-control")]


def test_check_62_the_own_page_and_allowed_origins_work(server, locked):
    assert server.request("/v1/models", Origin=server.url).status == 200
    allowed = {"Origin": "https://app.example"}
    preflight = locked.request(
        "/v1/chat/completions", method="OPTIONS", Access_Control_Request_Method="POST", **allowed
    )
    assert preflight.status == 204 and preflight.headers["access-control-allow-origin"] == "https://app.example"
    reply = locked.request("/v1/models", x_api_key=KEYS[0], **allowed)
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_a_page_could_send_unasked_is_refused(server, kind):
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    assert server.request("/v1/chat/completions", body, Content_Type=kind).status == 415


def test_a_compressed_body_is_refused(server):
    assert server.request("/v1/chat/completions", b"{}", Content_Encoding="gzip").status == 415


@pytest.mark.parametrize(
    "options",
    [
        {"messages": []},
        {"tools": []},
        {"tokenize": True},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"__class__": 1},
        {"bos_token": "x"},
        {"enable_thinking": {"a": [1] * 1000}},
        {"date_string": "x" * 100_000},
        {"custom_instructions": [["x"]]},
    ],
)
def test_check_64_options_cannot_replace_what_the_template_gets(server, options):
    reply = server.chat("Hi", chat_template_kwargs=options)
    assert reply.status == 400 and reply.error["param"] == "chat_template_kwargs"


def test_check_63_a_template_in_the_body_is_not_used(server):
    assert server.chat("Hi", chat_template="{{ 'x' * 10**9 }}").json["choices"][0]["message"]["content"]


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep(80),
        {"type": "string", "enum": [str(n) for n in range(50_000)]},
        {"type": "string", "pattern": "(a+)+$" * 2000},
        {"$ref": "http://169.254.169.254/x"},
        {"$ref": "file:///etc/passwd"},
        {"type": "string", "minLength": 10**9},
    ],
)
def test_check_65_hostile_schemas_are_refused_in_bounded_time(server, schema):
    import time

    began = time.monotonic()
    strict = tool(city=schema)
    strict["function"]["strict"] = True
    reply = server.chat("Hi", tools=[strict], tool_choice="required")
    assert reply.status == 400, reply.data[:300]
    assert time.monotonic() - began < 5
    assert server.chat("Hi").status == 200


def test_check_68_prompts_and_answers_are_in_no_log(server, caplog):
    server.script = "heliotrope answer"
    with caplog.at_level(logging.DEBUG):
        server.chat("heliotrope question")
        server.chat([{"role": "king", "content": "heliotrope"}])
        server.request(
            "/v1/responses",
            {"input": [{"type": "odd", "content": "heliotrope"}, {"role": "user", "content": "heliotrope"}]},
        )
    assert "heliotrope" not in caplog.text
