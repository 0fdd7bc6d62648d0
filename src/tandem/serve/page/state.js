// The panel with the live state: asks /status once a second while the page is visible. Asking wakes no model.
"use strict";

class StatePanel {
  constructor(readKey) {
    this.readKey = readKey;
    this.speeds = [];
    this.asking = false;
    setInterval(() => document.hidden || this.ask(), 1000);
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
    this.ask();
  }

  async ask() {
    if (this.asking) return;
    this.asking = true;
    try {
      const response = await fetch("status", { headers: headersWith(this.readKey()), cache: "no-store" });
      if (response.status === 401) this.showState("failed", "API key needed");
      else if (!response.ok) this.showState("failed", `status ${response.status}`);
      else this.show(await response.json());
    } catch {
      this.showState("unreachable", "server not reachable");
    } finally {
      this.asking = false;
    }
  }

  showState(state, words) {
    const chip = document.getElementById("state");
    if (chip.textContent !== words) chip.textContent = words; // unchanged words are not announced again
    chip.className = `chip ${state}`;
  }

  show(status) {
    this.showState(status.state, status.state);
    document.getElementById("state").title = status.reason || "";
    document.getElementById("model-name").textContent = status.model;
    const set = (id, text) => (document.getElementById(id).textContent = text);
    set("speed", status.tokens_per_s.toFixed(1));
    set("acceptance", status.acceptance === null ? "-" : `${(status.acceptance * 100).toFixed(0)} %`);
    set("running", status.running);
    set("queued", status.queued);
    set("written", status.completion_tokens.toLocaleString());
    const prompts = status.prompt_tokens;
    set("reused", prompts ? `${((status.reused_tokens / prompts) * 100).toFixed(0)} %` : "-");
    this.drawSpeeds(status.tokens_per_s);
    this.showMemory(status.memory);
    this.showSlots(status.slots);
  }

  drawSpeeds(speed) {
    this.speeds.push(speed);
    if (this.speeds.length > 121) this.speeds.shift();
    const most = Math.max(1, ...this.speeds);
    const from = 121 - this.speeds.length;
    const points = this.speeds.map((value, at) => `${from + at},${(31 - (value / most) * 29).toFixed(1)}`);
    document.querySelector("#history polyline").setAttribute("points", points.join(" "));
  }

  showMemory(memory) {
    const roles = Object.entries(memory).filter(([, size]) => size > 0);
    const total = roles.reduce((sum, [, size]) => sum + size, 0);
    document.getElementById("memory-total").textContent = total ? sizeText(total) : "";
    const bar = [];
    const list = [];
    roles.forEach(([role, size], at) => {
      const part = document.createElement("span");
      part.className = `tint-${at % 7}`;
      part.style.width = `${(size / total) * 100}%`;
      bar.push(part);
      const tint = document.createElement("span");
      tint.className = `tint tint-${at % 7}`;
      const bytes = document.createElement("b");
      bytes.textContent = sizeText(size);
      const entry = document.createElement("li");
      entry.append(tint, role, bytes);
      list.push(entry);
    });
    document.getElementById("memory-bar").replaceChildren(...bar);
    document.getElementById("memory").replaceChildren(...list);
  }

  showSlots(slots) {
    const entries = slots.map((slot) => {
      const entry = document.createElement("li");
      const what = slot.phase === "prefill" ? `prompt ${slot.prompt_done} of ${slot.prompt_tokens}` : `${slot.tokens} tokens`;
      entry.textContent = `${slot.phase}: ${what}, ${slot.age_s.toFixed(0)} s`;
      return entry;
    });
    if (!entries.length) {
      const none = document.createElement("li");
      none.className = "quiet";
      none.textContent = "none";
      entries.push(none);
    }
    document.getElementById("slots").replaceChildren(...entries);
  }
}

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  while (bytes >= 1024 && at < 3) {
    bytes /= 1024;
    at += 1;
  }
  return `${bytes.toFixed(at > 1 ? 1 : 0)} ${units[at]}`;
}
