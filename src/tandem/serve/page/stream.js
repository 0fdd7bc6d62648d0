// One request to /v1/chat/completions, its server-sent events as parsed objects. Errors are Error with the server's words.
"use strict";

function headersWith(key) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  return headers;
}

async function errorOf(response) {
  let words = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    if (body.error && body.error.message) words = body.error.message;
  } catch {
    // not JSON: the status line has to do
  }
  const error = new Error(words);
  error.status = response.status;
  return error;
}

async function* streamChat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headersWith(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // comments keep the connection alive, blank lines end an event
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        ended = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message || "the server reported an error");
      yield event;
    }
  }
  if (!ended) throw new Error("the connection ended before the answer did");
}
