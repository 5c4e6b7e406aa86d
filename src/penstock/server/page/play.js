// The playground. What the model says only ever becomes text nodes.

import { ApiError, post } from "./api.js";
import { TokenView } from "./tokens.js";

const $ = (id) => document.getElementById(id);

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const ms = (t) => (t < 1000 ? t.toFixed(t < 10 ? 1 : 0) + " ms" : (t / 1000).toFixed(2) + " s");

export class Playground {
  constructor({ model, wantKey }) {
    this.model = model;
    this.wantKey = wantKey;
    this.kind = "chat";
    this.messages = [];
    this.running = null;
    for (const kind of ["chat", "completion"]) $("tab-" + kind).addEventListener("click", () => this.choose(kind));
    document.querySelector("[role=tablist]").addEventListener("keydown", (e) => {
      if (e.target.role !== "tab" || !["ArrowLeft", "ArrowRight"].includes(e.key)) return;
      const other = this.kind === "chat" ? "completion" : "chat";
      if (!$("tab-" + other).disabled) this.choose(other, true);
    });
    $("ask").addEventListener("submit", (e) => { e.preventDefault(); this.send(); });
    $("prompt").addEventListener("keydown", (e) => {
      if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); this.send(); }
    });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
    $("probs").addEventListener("change", () => this.hint());
    this.hint();
  }

  // A model without a chat template can only complete.
  allowChat(yes) {
    $("tab-chat").disabled = !yes;
    if (!yes && this.kind === "chat") this.choose("completion");
  }

  choose(kind, focus = false) {
    if (kind === this.kind) return;
    this.stop();
    this.kind = kind;
    for (const each of ["chat", "completion"]) {
      const tab = $("tab-" + each), on = each === kind;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
      if (on && focus) tab.focus();
    }
    $("talk").setAttribute("aria-labelledby", "tab-" + kind);
    $("prompt").placeholder = kind === "chat" ? "Say something" : "Begin a text";
    $("prompt-label").textContent = kind === "chat" ? "Message" : "Text to complete";
    $("send").textContent = kind === "chat" ? "Send" : "Complete";
    $("system-box").hidden = kind !== "chat";
    this.clear();
  }

  clear() {
    this.stop();
    this.messages = [];
    $("log").replaceChildren();
    this.hint();
  }

  hint() {
    const hint = $("hint");
    hint.hidden = $("log").childElementCount > 0;
    hint.textContent = (this.kind === "chat" ? "Talk to the model." : "The model goes on with your text.")
      + " Enter sends, Shift+Enter makes a new line."
      + ($("probs").checked ? " Hover over a token, or move with the arrow keys, to see what else it could have been." : "");
  }

  stop() {
    if (this.running) this.running.abort();
  }

  // What the fields say; empty ones are left to the server.
  parameters() {
    const found = {};
    for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
      const value = $(name).value.trim();
      if (value !== "") found[name] = Number(value);
    }
    const stops = $("stops").value.split("\n").filter((s) => s !== "").map((s) => s.replaceAll("\\n", "\n"));
    if (stops.length) found.stop = stops;
    return found;
  }

  request(text) {
    const body = { model: this.model(), stream: true, stream_options: { include_usage: true }, ...this.parameters() };
    const probs = $("probs").checked;
    if (this.kind === "completion") {
      if (probs) body.logprobs = 5;
      return ["v1/completions", { ...body, prompt: text }];
    }
    if (probs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    const system = $("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...body, messages: [...first, ...this.messages, { role: "user", content: text }] }];
  }

  async send() {
    const text = $("prompt").value;
    if (this.running || !text.trim()) return;
    const kind = this.kind, messages = this.messages;
    const [path, body] = this.request(text);
    const turn = this.show(text);
    this.busy(true);
    this.running = new AbortController();
    $("prompt").value = "";
    let sent = performance.now(), first = null, last = null, usage = null, reason = null, answer = "";
    try {
      for await (const event of post(path, body, this.running.signal)) {
        if (event.usage) usage = event.usage;
        const choice = event.choices && event.choices[0];
        if (!choice) continue;
        const piece = kind === "chat" ? choice.delta.content || "" : choice.text || "";
        const thought = kind === "chat" ? choice.delta.reasoning_content || "" : "";
        if (piece || thought || choice.logprobs) { last = performance.now(); first ??= last; }
        answer += piece;
        turn.add(piece, thought, choice.logprobs);
        reason = choice.finish_reason || reason;
      }
      if (kind === "chat") messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
    } catch (error) {
      if (error.name === "AbortError") {
        reason = "stopped";
        if (kind === "chat" && answer) messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
      } else {
        if (error instanceof ApiError && error.status === 401) this.wantKey();
        turn.fail(error.message);
        $("prompt").value ||= text;
      }
    }
    turn.end(facts({ sent, first, last, usage, reason }));
    this.running = null;
    this.busy(false);
  }

  busy(yes) {
    $("stop").hidden = !yes;
    $("send").disabled = yes;
    if (!yes && (document.activeElement === document.body || document.activeElement === $("stop"))) $("prompt").focus();
  }

  // The bubbles of one exchange.
  show(text) {
    const log = $("log"), talk = $("talk");
    const answer = element("div", "turn model busy");
    const thoughts = element("div", "text given"), plain = element("span", "text");
    if (this.kind === "chat") {
      const user = element("div", "turn user");
      user.append(element("div", "text", text));
      log.append(user);
    } else {
      answer.append(element("span", "text given", text));
    }
    let tokens = null;
    answer.append(thoughts, plain);
    log.append(answer);
    this.hint();
    const scroll = () => { talk.scrollTop = talk.scrollHeight; };
    scroll();
    return {
      add(piece, thought, logprobs) {
        const near = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
        if (thought) thoughts.append(thought);
        if (logprobs && !tokens) {
          tokens = new TokenView();
          answer.replaceChild(tokens.element, plain);
        }
        if (tokens) tokens.add(logprobs, piece);
        else if (piece) plain.append(piece);
        if (near) scroll();
      },
      fail(message) { answer.append(element("div", "error", message)); },
      end(line) {
        answer.classList.remove("busy");
        if (tokens) answer.append(tokens.scale());
        if (line) answer.append(element("div", "facts", line));
        scroll();
      },
    };
  }
}

function facts({ sent, first, last, usage, reason }) {
  const found = [];
  if (first !== null) found.push("TTFT " + ms(first - sent));
  if (usage) {
    const num = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    if (first !== null && num > 1 && last > first) found.push((((num - 1) * 1000) / (last - first)).toFixed(1) + " tokens/s");
    found.push(`${num} tokens`, `prompt ${usage.prompt_tokens}, ${cached} cached`);
  }
  if (reason) found.push(reason);
  return found.join(" · ");
}
