// Text of a model, as it comes, into elements: fenced code, headings, lists, paragraphs, inline code and emphasis.
// Everything is set as text; nothing that a model writes is ever read as HTML.
"use strict";

class MarkdownWriter {
  constructor(container) {
    this.container = container;
    this.block = null; // the paragraph, list or code that the next line may continue
    this.fence = ""; // what closes the open code block
    this.rest = ""; // the line that has no end yet
    this.tail = null; // how it is shown meanwhile
  }

  push(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    if (this.tail) this.tail.remove();
    this.tail = null;
    for (const line of lines) this.line(line);
    if (this.rest && !/^\s*(`{1,}|~{1,}|#{1,6}|[-*+]|\d+[.)])?$/.test(this.rest)) this.showRest();
  }

  end() {
    const rest = this.rest;
    this.rest = "";
    if (this.tail) this.tail.remove();
    this.tail = null;
    if (rest) this.line(rest);
    this.fence = "";
    this.block = null;
  }

  showRest() {
    this.tail = document.createElement("span");
    if (this.fence) this.tail.textContent = this.rest;
    else writeInline(this.tail, this.rest);
    const home = this.block && this.block.tagName !== "UL" && this.block.tagName !== "OL" ? this.block : this.container;
    if (home !== this.container && !this.fence && home.childNodes.length) this.tail.prepend("\n");
    home.append(this.tail);
  }

  line(line) {
    const fence = /^\s*(`{3,}|~{3,})\s*([^`]*)$/.exec(line);
    if (this.fence) {
      if (fence && fence[1].startsWith(this.fence) && !fence[2]) {
        this.fence = "";
        this.block = null;
      } else this.block.append(line + "\n");
      return;
    }
    if (fence) return this.openCode(fence[1], fence[2].trim());
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const item = /^\s*([-*+]|\d+[.)])\s+(.*)$/.exec(line);
    if (!line.trim()) this.block = null;
    else if (heading) {
      writeInline(this.open("h5"), heading[2]);
      this.block = null;
    } else if (item) {
      const tag = /\d/.test(item[1]) ? "ol" : "ul";
      if (!this.block || this.block.tagName !== tag.toUpperCase()) {
        this.open(tag);
        if (tag === "ol") this.block.start = parseInt(item[1], 10);
      }
      const entry = document.createElement("li");
      writeInline(entry, item[2]);
      this.block.append(entry);
    } else {
      if (!this.block || this.block.tagName !== "P") this.open("p");
      else this.block.append("\n");
      writeInline(this.block, line);
    }
  }

  open(tag) {
    this.block = document.createElement(tag);
    this.container.append(this.block);
    return this.block;
  }

  openCode(fence, language) {
    const box = document.createElement("div");
    box.className = "block";
    const pre = document.createElement("pre");
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const code = document.createElement("code");
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        copy.textContent = "Copied";
      } catch {
        copy.textContent = "No access";
      }
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    pre.append(code);
    box.append(pre, copy);
    this.container.append(box);
    this.block = code;
    this.fence = fence;
  }
}

function writeInline(element, text) {
  const pattern = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(\S|\S.*?\S)\*\*/g;
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    if (found.index > at) element.append(text.slice(at, found.index));
    const part = document.createElement(found[1] ? "code" : "strong");
    part.textContent = found[1] ? found[2] : found[3];
    element.append(part);
    at = found.index + found[0].length;
  }
  if (at < text.length) element.append(text.slice(at));
}
