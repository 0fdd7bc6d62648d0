"""The log: what may never be in it, whichever way it comes, and what each line tells."""

import io
import json
import logging

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import PlanError, RequestError
from tandem.serve.logs import SECRET_FIELDS, TEXT_FIELDS, configure_logs, exception_lines, redact

KEY = "k3y-with-enough-characters"
PROMPT = "my diary of the third of May"


@pytest.fixture(autouse=True)
def logging_as_before():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def configured(layout="json", level="info", **options) -> io.StringIO:
    out = io.StringIO()
    configure_logs(level, layout, keys=[KEY], stream=out, **options)
    return out


def lines(out: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_one_json_object_for_each_event_with_time_and_level():
    out = configured()
    structlog.get_logger("tandem.requests").info("answer", id="req_1", tokens=12, tok_s=3.5)
    logging.getLogger("tandem").warning("asleep at level %d", 2)
    first, second = lines(out)
    assert (
        first["event"] == "answer"
        and first["tokens"] == 12
        and first["level"] == "info"
        and first["time"].endswith("Z")
    )
    assert second["event"] == "asleep at level 2" and second["level"] == "warning"


def test_levels_hold_for_both_kinds_of_loggers_and_libraries_are_heard_from_warning_on():
    out = configured(level="info")
    structlog.get_logger("tandem.x").debug("unseen")
    logging.getLogger("tandem.x").debug("unseen")
    logging.getLogger("httpx2").info("unseen")
    logging.getLogger("uvicorn.access").warning("unseen")
    logging.getLogger("uvicorn.error").warning("seen")
    assert [line["event"] for line in lines(out)] == ["seen"]
    out = configured(level="debug")
    logging.getLogger("tandem.x").debug("seen")
    assert [line["event"] for line in lines(out)] == ["seen"]


@pytest.mark.parametrize("field", sorted(TEXT_FIELDS))
def test_what_clients_and_models_write_is_withheld_at_any_depth(field):
    for value in (PROMPT, [PROMPT], {"x": {"y": PROMPT}}, PROMPT.encode()):
        for event in ({field: value}, {"request": {field: value}}, {"parts": [{"deep": {field.upper(): value}}]}):
            assert PROMPT not in json.dumps(redact(event))
    assert PROMPT in json.dumps(redact({field: PROMPT}, texts=True))


@pytest.mark.parametrize("field", sorted(SECRET_FIELDS | {"X-Api-Key", "Authorization"}))
def test_secrets_are_never_shown_not_even_with_texts(field):
    for texts in (False, True):
        assert "s3cret" not in json.dumps(redact({field: "s3cret", "in": {field: ["s3cret"]}}, texts=texts))


@pytest.mark.parametrize(
    "text, leak",
    [
        (f"got {KEY} from a client", KEY),
        ("Authorization: Bearer abcdef123456", "abcdef123456"),
        ("headers {'authorization': 'Bearer abcdef123456'}", "abcdef123456"),
        ("x-api-key: abcdef123456", "abcdef123456"),
        ('{"api_key": "abcdef123456"}', "abcdef123456"),
        ("password=hunter2hunter2", "hunter2"),
        ("the key sk-ant-REDACTED-0123456789 was refused", "0123456789"),
        ("hf_abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("image data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAA failed", "iVBORw0KGgo"),
    ],
)
def test_secrets_and_images_within_texts_are_cut_out(text, leak):
    for texts in (False, True):
        shown = redact({"event": text, "deep": [text]}, keys=[KEY], texts=texts)
        assert leak not in json.dumps(shown)
        assert shown["event"].split()[0] == text.split()[0] or "[secret]" in shown["event"]


def test_plain_numbers_and_words_stay():
    event = {
        "event": "answer",
        "tokens": 5,
        "reused": 0,
        "tok_s": 1.5,
        "finish": "stop",
        "diverged": "token 4,117: date changed",
    }
    assert redact(event) == event


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.just(PROMPT) | st.just(f"x {KEY} y") | st.integers() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["content", "tools", "n", "key"]), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_no_nesting_brings_a_prompt_or_a_key_into_the_log(value):
    assert KEY not in json.dumps(redact({"event": "x", "value": value}, keys=[KEY]))
    assert PROMPT not in json.dumps(redact({"event": "x", "messages": value}, keys=[KEY]))


def raised(error: Exception) -> Exception:
    try:
        try:
            raise KeyError(PROMPT)
        except KeyError as inner:
            raise error from inner
    except Exception as outer:
        return outer


def test_exceptions_tell_where_they_were_raised_and_not_what_a_client_wrote():
    error = raised(RequestError(f"found {PROMPT!r}"))
    told = exception_lines(error, texts=False)
    assert PROMPT not in told
    assert "RequestError (message withheld" in told and "KeyError (message withheld" in told
    assert f"{__file__}:" in told and " raised" in told
    assert PROMPT in exception_lines(error, texts=True)
    assert "needs 3 GiB" in exception_lines(raised(PlanError("needs 3 GiB")), texts=False)


@pytest.mark.parametrize("layout", ["json", "console"])
def test_no_way_of_logging_an_exception_shows_its_text(layout):
    out = configured(layout)
    error = raised(RequestError(f"found {PROMPT!r} and {KEY}"))
    structlog.get_logger("tandem.x").error("failed", error=error)
    structlog.get_logger("tandem.x").error("failed", exc_info=error)
    logging.getLogger("tandem").error("failed: %s", error)
    logging.getLogger("uvicorn.error").error("in the app", exc_info=(type(error), error, error.__traceback__))
    try:
        raise error
    except RequestError:
        logging.getLogger("tandem").exception("caught")
        structlog.get_logger("tandem.x").exception("caught")
    assert PROMPT not in out.getvalue() and KEY not in out.getvalue()
    assert out.getvalue().count("RequestError (message withheld") == 6
    assert out.getvalue().count("test_logs.py") >= 4


def test_texts_are_logged_on_request_but_keys_still_not():
    out = configured(texts=True)
    structlog.get_logger("tandem.x").info(
        "answer", prompt=PROMPT, answer=f"the key is {KEY}", error=RequestError("long prompt")
    )
    [line] = lines(out)
    assert line["prompt"] == PROMPT and KEY not in out.getvalue() and line["error"] == "RequestError: long prompt"


def test_a_text_cannot_command_the_terminal_or_forge_lines():
    out = configured("console", texts=True)
    structlog.get_logger("tandem.x").info("answer", answer="\x1b[2Jgone\r\nlevel=error forged")
    assert "\x1b[2J" not in out.getvalue() and "\r" not in out.getvalue()
    out = configured("json", texts=True)
    structlog.get_logger("tandem.x").info("answer", answer="a\n{}")
    assert len(out.getvalue().splitlines()) == 1


def test_long_texts_are_cut():
    out = configured(texts=True)
    structlog.get_logger("tandem.x").info("answer", answer="a" * 100_000)
    assert len(out.getvalue()) < 2_500 and "[100000 characters]" in out.getvalue()


def test_auto_means_json_where_there_is_no_terminal():
    out = configured("auto")
    structlog.get_logger("tandem.x").info("x")
    assert lines(out)[0]["event"] == "x"
