// The conversation: sends it, shows the answer while it is written, stops it, writes the last answer anew.
"use strict";

const byId = (id) => document.getElementById(id);
const conversation = []; // messages as the API takes them
let running = null; // AbortController of the answer being written

byId("key").value = sessionStorage.getItem("tandem-key") || "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem("tandem-key", byId("key").value);
  listModels();
});
const readKey = () => byId("key").value.trim();

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function atEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function addMessage(role) {
  byId("empty").hidden = true;
  const box = make("article", `message ${role}`);
  box.append(make("h4", "", role === "user" ? "You" : "Model"));
  byId("log").append(box);
  byId("log").scrollTop = byId("log").scrollHeight;
  return box;
}

// One answer on the page. Text is collected and written once for each picture that the screen shows.
class AnswerView {
  constructor() {
    this.box = addMessage("assistant");
    this.content = make("div", "content busy");
    this.box.append(this.content);
    this.writer = new MarkdownWriter(this.content);
    this.text = "";
    this.reasoning = "";
    this.waiting = { text: "", reasoning: "" };
    this.scheduled = false;
    this.began = performance.now();
    this.first = null;
  }

  add(kind, piece) {
    if (this.first === null) this.first = performance.now();
    this[kind] += piece;
    this.waiting[kind] += piece;
    if (!this.scheduled) {
      this.scheduled = true;
      // a hidden page gets no pictures: a timer writes there
      document.hidden ? setTimeout(() => this.write(), 200) : requestAnimationFrame(() => this.write());
    }
  }

  write() {
    this.scheduled = false;
    const follow = atEnd();
    const { text, reasoning } = this.waiting;
    this.waiting = { text: "", reasoning: "" };
    if (reasoning) {
      if (!this.thoughts) this.openReasoning();
      this.thoughts.append(reasoning);
      this.summary.textContent = `Reasoning (${this.reasoning.length.toLocaleString()} characters)`;
    }
    if (text) this.writer.push(text);
    if (follow) byId("log").scrollTop = byId("log").scrollHeight;
  }

  openReasoning() {
    const details = make("details", "reasoning");
    this.summary = make("summary", "", "Reasoning");
    this.thoughts = make("div");
    details.append(this.summary, this.thoughts);
    this.content.before(details);
  }

  end(note, usage) {
    this.write();
    this.writer.end();
    this.content.classList.remove("busy");
    const footer = make("footer", "quiet");
    const words = [];
    if (usage) {
      const seconds = (performance.now() - (this.first || this.began)) / 1000;
      const rate = usage.completion_tokens > 1 && seconds > 0 ? (usage.completion_tokens - 1) / seconds : 0;
      words.push(`${usage.completion_tokens} tokens${rate ? `, ${rate.toFixed(1)}/s` : ""}`);
      words.push(`first after ${(((this.first || performance.now()) - this.began) / 1000).toFixed(2)} s`);
    }
    if (note) words.push(note);
    footer.append(make("span", "", words.join(" - ")));
    const again = make("button", "again", "Again");
    again.type = "button";
    again.title = "Write this answer anew";
    again.addEventListener("click", () => running || rewrite(this.box));
    footer.append(again);
    this.box.append(footer);
    for (const button of document.querySelectorAll(".again")) button.hidden = button !== again;
  }

  fail(words) {
    this.box.append(make("p", "error", words));
  }
}

const ENDS = { length: "stopped at the limit of tokens", loop: "stopped: it had begun to repeat itself", tool_calls: "asked for a tool" };

function requestBody() {
  const body = { model: byId("model").value || undefined, messages: conversation.slice() };
  const system = byId("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  if (byId("max-tokens").value !== "") body.max_tokens = Number(byId("max-tokens").value);
  if (byId("thinking").value) body.chat_template_kwargs = { enable_thinking: byId("thinking").value === "on" };
  return body;
}

async function answer() {
  const view = new AnswerView();
  running = new AbortController();
  showRunning(true);
  let usage = null;
  let note = "";
  try {
    for await (const chunk of streamChat(requestBody(), readKey(), running.signal)) {
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices && chunk.choices[0];
      if (!choice) continue;
      const delta = choice.delta || {};
      if (delta.reasoning_content) view.add("reasoning", delta.reasoning_content);
      if (delta.content) view.add("text", delta.content);
      for (const call of delta.tool_calls || []) {
        if (call.function && call.function.name) view.add("text", `\n\n[tool: ${call.function.name}] `);
        if (call.function && call.function.arguments) view.add("text", call.function.arguments);
      }
      if (choice.finish_reason) note = ENDS[choice.finish_reason] || "";
    }
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else view.fail(error.message || String(error));
    if (error.status === 401) byId("key").focus();
  }
  view.end(note, usage);
  if (view.box.isConnected && (view.text || view.reasoning)) {
    const message = { role: "assistant", content: view.text };
    if (view.reasoning) message.reasoning_content = view.reasoning;
    conversation.push(message);
  }
  running = null;
  showRunning(false);
}

function showRunning(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  byId("log").setAttribute("aria-busy", String(on));
  (on ? byId("stop") : byId("prompt")).focus();
}

function rewrite(box) {
  if (conversation.length && conversation[conversation.length - 1].role === "assistant") conversation.pop();
  box.remove();
  answer();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  const last = conversation[conversation.length - 1];
  if (last && last.role === "user") conversation.pop(); // it got no answer: the new text stands in its place
  conversation.push({ role: "user", content: text });
  addMessage("user").append(text);
  byId("prompt").value = "";
  answer();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running && running.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && running && running.abort());
byId("new-chat").addEventListener("click", () => {
  if (running) running.abort();
  conversation.length = 0;
  for (const box of document.querySelectorAll("#log .message")) box.remove();
  byId("empty").hidden = false;
  byId("prompt").focus();
});
byId("toggle-panel").addEventListener("click", () => {
  const panel = byId("panel");
  panel.hidden = !panel.hidden;
  byId("toggle-panel").setAttribute("aria-expanded", String(!panel.hidden));
});

async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: headersWith(readKey()) });
    if (!response.ok) throw await errorOf(response);
    const models = (await response.json()).data;
    byId("model").replaceChildren(...models.map((model) => make("option", "", model.id)));
    byId("alert").hidden = true;
  } catch (error) {
    byId("alert").textContent = error.status === 401 ? "This server asks for an API key: enter it under Settings." : error.message;
    byId("alert").hidden = false;
  }
}

new StatePanel(readKey);
listModels();
