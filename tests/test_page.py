"""The web page in headless Chromium, over a scripted API: streaming, stop, reasoning, hostile texts, keys, state."""

import asyncio
import json
import re
import threading
import time

import pytest
import uvicorn
from browser import chromium
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tandem.serve.page import FILES, FOLDER, page_routes

STATUS = {
    "model": "tiny",
    "state": "loaded",
    "reason": "",
    "sleep_level": 0,
    "queued": 2,
    "running": 1,
    "tokens_per_s": 12.34,
    "acceptance": 0.625,
    "drafted": 8,
    "draft_accepted": 5,
    "prompt_tokens": 100,
    "reused_tokens": 75,
    "completion_tokens": 1234,
    "cancelled": 0,
    "failed": 0,
    "memory": {"weights": 3 << 20, "kv": 1 << 20, "scratch": 0},
    "slots": [
        {
            "phase": "prefill",
            "priority": "interactive",
            "prompt_done": 64,
            "prompt_tokens": 100,
            "tokens": 0,
            "age_s": 1.0,
        }
    ],
}
HOSTILE = (
    '<img src=x onerror="window.broken=1"><script>window.broken=2</script>\n\n'
    "```html\n<script>window.broken=3</script>\n```\n[x](javascript:window.broken=4) <b>bold</b> **real** "
    "`<img src=x onerror=window.broken=6>` **<i onclick=window.broken=7>x</i>**"
)


class Script:
    """What the stand-in API does: deltas to stream, seconds between them, what it saw."""

    def __init__(self):
        self.deltas: list[dict] = []
        self.pause_s, self.end, self.error, self.key = 0.0, "stop", None, None
        self.bodies: list[dict] = []
        self.closed = threading.Event()
        self.status = dict(STATUS)

    def text(self, text: str, size: int = 3) -> None:
        self.deltas = [{"content": text[at : at + size]} for at in range(0, len(text), size)]

    def app(self) -> Starlette:
        def locked(request):
            return self.key and request.headers.get("authorization") != f"Bearer {self.key}"

        async def models(request):
            if locked(request):
                return JSONResponse({"error": {"message": "wrong key"}}, 401)
            return JSONResponse({"data": [{"id": "tiny"}, {"id": "other"}]})

        async def status(request):
            return JSONResponse(self.status)

        async def chat(request):
            if locked(request):
                return JSONResponse({"error": {"message": "wrong key"}}, 401)
            self.bodies.append(await request.json())
            if self.error and not self.deltas:
                return JSONResponse({"error": {"message": self.error}}, 400)
            return StreamingResponse(self._events(), media_type="text/event-stream")

        routes = [
            Route("/v1/models", models),
            Route("/status", status),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
        return Starlette(routes=page_routes() + routes)

    async def _events(self):
        done = False
        try:
            yield ": ping\n\n"
            for delta in self.deltas:
                yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                await asyncio.sleep(self.pause_s)
            if self.error:
                yield _event({"error": {"message": self.error}})
                return
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.end}]})
            yield _event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(self.deltas)}})
            yield "data: [DONE]\r\n\r\n"
            done = True
        finally:
            if not done:
                self.closed.set()


def _event(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server():
    holder = {}

    async def app(scope, receive, send):
        await holder["app"](scope, receive, send)

    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    holder["url"] = f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/"
    yield holder
    http.should_exit = True
    thread.join(5)


@pytest.fixture
def script(server):
    made = Script()
    server["app"] = made.app()
    return made


@pytest.fixture
def page(browser, server, script):
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(8000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.outside = []
    page.on(
        "request", lambda request: None if request.url.startswith(server["url"]) else page.outside.append(request.url)
    )
    page.goto(server["url"])
    yield page
    assert page.outside == [], "the page asks nobody but its own server"
    context.close()


def ask(page, text="Hello"):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait(page, condition: str, seconds: float = 8.0):
    """Until the expression is true; the page's policy forbids playwright's own way, which evaluates within it."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def finished(page, n=1):
    wait(page, f"document.querySelectorAll('.message footer').length == {n}")
    return page.locator(".message.assistant").nth(n - 1)


def test_an_answer_streams_and_shows_its_speed(page, script):
    script.text("Hello **there**, `code` and more.\n\n- one\n- two\n\n1. first\n\n# Head\n\nlast")
    ask(page, "Hi <b>you</b>")
    answer = finished(page)
    assert page.locator(".message.user").inner_text().endswith("Hi <b>you</b>")
    assert answer.locator("strong").inner_text() == "there"
    assert answer.locator("p code").inner_text() == "code"
    assert answer.locator("ul li").all_inner_texts() == ["one", "two"]
    assert answer.locator("ol li").all_inner_texts() == ["first"]
    assert answer.locator("h5").inner_text() == "Head"
    assert re.search(r"\d+ tokens, [\d.]+/s - first after \d", answer.locator("footer").inner_text())
    assert script.bodies[0]["messages"] == [{"role": "user", "content": "Hi <b>you</b>"}]
    assert script.bodies[0]["stream"] and script.bodies[0]["stream_options"] == {"include_usage": True}
    assert page.problems == []


def test_text_is_visible_before_the_answer_ends(page, script):
    script.text("one two three four five six seven eight nine ten " * 20)
    script.pause_s = 0.02
    ask(page)
    wait(page, "document.querySelector('.message.assistant .content')?.textContent.includes('three four')")
    assert page.locator(".message footer").count() == 0
    assert page.locator("#stop").is_visible() and not page.locator("#send").is_visible()


def test_stop_ends_the_request_and_keeps_what_was_written(page, script):
    script.text("word " * 2000)
    script.pause_s = 0.02
    ask(page)
    wait(page, "document.querySelector('.message.assistant .content')?.textContent.length > 20")
    page.click("#stop")
    answer = finished(page)
    assert script.closed.wait(5), "the server saw the connection close"
    assert "stopped" in answer.locator("footer").inner_text()
    assert page.locator("#send").is_visible()
    script.text("fine")
    ask(page, "And?")
    finished(page, 2)
    messages = script.bodies[1]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].startswith("word word")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_nothing_that_a_model_writes_becomes_markup(page, script, size):
    script.text(HOSTILE, size)
    ask(page)
    answer = finished(page)
    assert page.evaluate("window.broken") is None
    assert answer.locator("script, img, a, b, i").count() == 0
    assert answer.locator("pre code").inner_text() == "<script>window.broken=3</script>\n"
    assert answer.locator("strong").first.inner_text() == "real"
    assert "<img src=x" in answer.inner_text()
    assert page.problems == []


@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_code_blocks_are_the_same_however_the_text_is_split(page, script, size):
    code = "def f(x):\n    # ``` not a fence here\n    return `x`\n\n\n"
    script.text(f"Look:\n````python\n{code}````\nand ~~~\n~~~\nopen until the end", size)
    ask(page)
    blocks = finished(page).locator("pre code")
    assert blocks.nth(0).text_content() == code
    assert "open until the end" in finished(page).inner_text()


def test_reasoning_is_folded_and_comes_back_in_the_next_turn(page, script):
    script.deltas = [
        {"role": "assistant"},
        {"reasoning_content": "Let me "},
        {"reasoning_content": "think."},
        {"content": "42"},
    ]
    ask(page)
    answer = finished(page)
    details = answer.locator("details.reasoning")
    assert details.get_attribute("open") is None
    assert "Reasoning (13 characters)" in details.locator("summary").inner_text()
    assert not details.locator("div").is_visible()
    details.locator("summary").click()
    assert details.locator("div").inner_text() == "Let me think."
    assert answer.locator(".content").inner_text().strip() == "42"
    ask(page, "Why?")
    finished(page, 2)
    assert script.bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "42",
        "reasoning_content": "Let me think.",
    }


def test_errors_before_and_within_a_stream_are_shown(page, script):
    script.error = "the model <tiny> is not there"
    ask(page)
    assert finished(page).locator(".error").inner_text() == "the model <tiny> is not there"
    script.text("half an ans")
    ask(page, "Again")
    answer = finished(page, 2)
    assert answer.locator(".error").inner_text() == script.error and "half an ans" in answer.inner_text()
    assert [m["role"] for m in script.bodies[1]["messages"]] == ["user"], "a message without an answer is replaced"


def test_settings_reach_the_request(page, script):
    script.text("ok")
    page.select_option("#model", "other")
    page.fill("#temperature", "0.3")
    page.fill("#max-tokens", "77")
    page.select_option("#thinking", "off")
    page.fill("#system", "Be brief.")
    ask(page)
    finished(page)
    body = script.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0.3, 77)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_key_is_asked_for_sent_and_kept_for_the_tab_only(page, script, server, browser):
    script.key = "k3y-with-enough-characters"
    page.reload()
    page.wait_for_selector("#alert:not([hidden])")
    assert "API key" in page.locator("#alert").inner_text()
    page.fill("#key", script.key)
    page.press("#key", "Tab")
    page.wait_for_selector("#alert", state="hidden")
    script.text("in")
    ask(page)
    finished(page)
    page.reload()
    assert page.input_value("#key") == script.key
    assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
    other = page.context.new_page()
    other.goto(server["url"])
    assert other.input_value("#key") == ""


def test_the_state_is_live(page, script):
    wait(page, "document.getElementById('speed').textContent == '12.3'")
    texts = {
        name: page.inner_text(f"#{name}")
        for name in ("state", "model-name", "acceptance", "running", "queued", "reused")
    }
    assert texts == {
        "state": "loaded",
        "model-name": "tiny",
        "acceptance": "63 %",
        "running": "1",
        "queued": "2",
        "reused": "75 %",
    }
    assert page.locator("#memory li").all_inner_texts() == ["weights\n3.0 MiB", "kv\n1.0 MiB"]
    assert "prefill: prompt 64 of 100" in page.inner_text("#slots")
    script.status |= {"state": "sleeping", "tokens_per_s": 0.0, "slots": []}
    wait(page, "document.getElementById('state').textContent == 'sleeping'")
    assert page.inner_text("#slots") == "none"
    assert len(page.get_attribute("#history polyline", "points").split()) >= 2


def test_again_writes_the_last_answer_anew_and_new_chat_forgets(page, script):
    script.text("first")
    ask(page)
    finished(page)
    script.text("second")
    page.click(".again")
    wait(page, "document.querySelector('.message.assistant .content')?.textContent == 'second'")
    assert page.locator(".message.assistant").count() == 1
    assert script.bodies[1]["messages"] == script.bodies[0]["messages"]
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    ask(page, "Fresh")
    finished(page)
    assert [m["content"] for m in script.bodies[2]["messages"]] == ["Fresh"]


def test_it_can_be_used_by_keyboard_and_read_by_a_screen_reader(page, script):
    script.text("text " * 2000)
    script.pause_s = 0.02
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    wait(page, "document.activeElement.id == 'stop'")
    page.keyboard.press("Escape")
    finished(page)
    assert script.bodies[0]["messages"][0]["content"] == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "prompt"
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].filter(
            e => !(e.textContent.trim() && e.tagName == 'BUTTON') && !e.labels?.length && !e.getAttribute('aria-label')
        ).map(e => e.outerHTML)"""
    )
    assert unnamed == []
    assert page.get_attribute("#log", "aria-live") == "polite" and page.get_attribute("html", "lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast_in_both_schemes(page, script, scheme):
    script.text("Some text with `code`")
    page.emulate_media(color_scheme=scheme)
    ask(page)
    finished(page)
    worst = page.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst


def test_it_fits_a_narrow_screen(page, script):
    script.text("a" * 500 + "\n```\n" + "b" * 500 + "\n```\n")
    page.set_viewport_size({"width": 360, "height": 640})
    ask(page)
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_long_answer_stays_cheap_to_show(page, script):
    script.text("Some words of a long answer with `code` in it. " * 60 + "\n\n", 40)
    script.deltas *= 20  # 57 KB
    began = time.perf_counter()
    ask(page)
    finished(page)
    assert time.perf_counter() - began < 8


def test_the_policy_lets_in_no_script_but_the_pages_own(page, server):
    response = page.request.get(server["url"])
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    page.evaluate(
        "() => { const s = document.createElement('script'); s.append('window.broken = 5'); document.body.append(s); }"
    )
    assert page.evaluate("window.broken") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_the_files_hold_no_outside_address_and_no_way_to_write_markup():
    names = {name for name, _ in FILES.values()}
    assert {path.name for path in FOLDER.iterdir()} == names
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", text
        )


CONTRAST = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType == 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.matches('.skip, .hidden, option, noscript')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 100)];
  }
  return worst;
}"""
