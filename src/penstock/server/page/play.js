// The playground: a conversation, what is asked next, and the answer as it comes.

import { ApiError, post } from "./api.js";
import { $, announce } from "./dom.js";
import { Attachments, withFiles } from "./files.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { AnswerView, toolTurn, userTurn } from "./turns.js";
import { arrived, branch, pager, turned } from "./versions.js";

const SPOKEN = 3000; // characters of an answer that screen readers are given at once

const ms = (t) => (t < 1000 ? t.toFixed(t < 10 ? 1 : 0) + " ms" : (t / 1000).toFixed(2) + " s");

// Streamed pieces of tool calls, put together.
function addCalls(calls, deltas = []) {
  for (const { index = 0, id, type, function: part } of deltas) {
    calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = calls[index];
    if (id) call.id = id;
    if (type) call.type = type;
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }
}

export class Playground {
  constructor({ model, wantKey }) {
    this.model = model;
    this.wantKey = wantKey;
    this.running = null;
    this.editing = null;
    this.leftovers = [];
    this.settings = new Settings();
    this.files = new Attachments();
    this.chat = this.fresh("chat");
    for (const kind of ["chat", "completion"]) $("tab-" + kind).addEventListener("click", () => this.choose(kind));
    document.querySelector("[role=tablist]").addEventListener("keydown", (e) => {
      if (e.target.role !== "tab" || !["ArrowLeft", "ArrowRight"].includes(e.key)) return;
      const other = this.chat.kind === "chat" ? "completion" : "chat";
      if (!$("tab-" + other).disabled) this.choose(other, true);
    });
    $("ask").addEventListener("submit", (e) => { e.preventDefault(); this.send(); });
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => this.begin());
    $("edit-cancel").addEventListener("click", () => this.edit(null));
    $("probs").addEventListener("change", () => this.hint());
    store.onDeleted((id) => this.forget(id));
    const last = store.load(store.current());
    if (last) this.open(last);
    else this.show();
  }

  fresh(kind) {
    return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), kind, turns: [], views: [], kept: true };
  }

  // A model without a chat template can only complete.
  allowChat(yes) {
    $("tab-chat").disabled = !yes;
    if (!yes && this.chat.kind === "chat") this.choose("completion");
  }

  choose(kind, focus = false) {
    if (kind !== this.chat.kind) this.begin(kind);
    if (focus) $("tab-" + kind).focus();
  }

  // An empty conversation. The one before it stays in the history.
  begin(kind = this.chat.kind) {
    this.stop();
    store.current(null);
    this.chat = this.fresh(kind);
    this.show();
  }

  open(saved) {
    this.stop();
    store.current(saved.id);
    this.chat = { ...this.fresh(saved.kind), id: saved.id, turns: saved.turns, system: saved.system || "" };
    this.settings.system = this.chat.system;
    this.show();
  }

  // A conversation was deleted elsewhere: nothing may write it again.
  forget(id) {
    if (id !== this.chat.id) return;
    this.chat.kept = false;
    this.begin();
  }

  cleared() {
    this.forget(this.chat.id);
    this.settings.reset();
    $("single").checked = true;
    $("probs").checked = false;
    $("prompt").value = "";
    this.files.set([]);
  }

  show() {
    const { kind, turns } = this.chat, chat = kind === "chat";
    for (const each of ["chat", "completion"]) {
      const tab = $("tab-" + each), on = each === kind;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
    }
    $("talk").setAttribute("aria-labelledby", "tab-" + kind);
    $("prompt").placeholder = chat ? "Say something" : "Begin a text";
    $("prompt-label").textContent = chat ? "Message" : "Text to complete";
    $("send").textContent = chat ? "Send" : "Complete";
    for (const id of ["system-box", "tools-box"]) $(id).hidden = !chat;
    this.settings.placeholders(kind);
    this.edit(null);
    this.leftovers = [];
    this.chat.views = turns.map((turn, i) => this.draw(turn, i));
    $("log").replaceChildren(...this.chat.views.map((view) => view.element));
    turns.forEach((_, i) => this.pager(i));
    this.results();
    this.hint();
    this.down();
  }

  // One turn that is complete: {element}. A completion shows what was given in front of the answer.
  draw(turn, i) {
    if (turn.role === "tool") return { element: toolTurn(turn) };
    if (turn.role === "user") {
      if (this.chat.kind === "completion") return { element: document.createComment("") };
      return { element: userTurn(turn, () => this.edit(turn)) };
    }
    const view = this.answer(turn, this.chat.turns[i - 1]);
    view.end();
    return view;
  }

  // What shows turn i: of a completion, whose text stands before its answer, the answer.
  shown(i) {
    const hidden = this.chat.kind === "completion" && this.chat.turns[i].role === "user";
    return this.chat.views[hidden ? i + 1 : i]?.element;
  }

  pager(i) {
    const turn = this.chat.turns[i];
    if (turn.others && this.shown(i)) pager(this.shown(i), turn, (to) => this.turnTo(i, to, to > turn.others.indexOf(null)));
  }

  turnTo(i, to, forward) {
    if (this.running) return;
    this.chat.turns = turned(this.chat.turns, i, to);
    this.keep();
    this.show();
    arrived(this.shown(i), forward);
  }

  answer(turn, before, asJson = false) {
    const completion = this.chat.kind === "completion";
    const actions = [["Regenerate", () => this.regenerate(turn), "Regenerate this answer"]];
    if (completion) actions.unshift(["Edit", () => this.edit(before), "Edit the text"]);
    return new AnswerView(turn, { given: completion ? before?.text ?? "" : null, asJson, actions });
  }

  hint() {
    const hint = $("hint"), chat = this.chat.kind === "chat";
    hint.hidden = $("log").childElementCount > 0;
    hint.textContent = (chat ? "Talk to the model." : "The model goes on with your text.")
      + " Enter sends, Shift+Enter makes a new line."
      + ($("probs").checked ? " Hover over a token, or move with the arrow keys, to see what else it could have been." : "");
  }

  down() {
    $("talk").scrollTop = $("talk").scrollHeight;
  }

  // Whether the end is in sight: then it stays so as the conversation grows.
  near() {
    const talk = $("talk");
    return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  }

  stop() {
    this.running?.abort();
  }

  // A message to write anew; null: none.
  edit(turn) {
    if (turn) {
      $("prompt").value = turn.text;
      this.files.set(turn.files || []);
      $("prompt").focus();
    } else if (this.editing) {
      $("prompt").value = "";
      this.files.set([]);
    }
    this.editing = turn;
    $("editing").hidden = !turn;
  }

  editLast() {
    const last = this.chat.turns.findLast((turn) => turn.role === "user");
    if (last && !this.running) this.edit(last);
  }

  regenerate(turn = this.chat.turns.at(-1)) {
    const { kind, turns } = this.chat, at = turns.indexOf(turn);
    if (at <= 0 || turn.role !== "assistant") return;
    if (kind === "chat") this.ask(at, []);
    else this.ask(at - 1, [{ ...turns[at - 1], others: undefined }]); // text and answer are one version
  }

  request(turns) {
    const { kind } = this.chat;
    const body = { model: this.model(), stream: true, stream_options: { include_usage: true }, ...this.settings.request(kind) };
    const probs = $("probs").checked;
    if (kind === "completion") {
      const last = turns.at(-1);
      return ["v1/completions", { ...body, ...(probs && { logprobs: 5 }), prompt: withFiles(last.text, last.files) }];
    }
    const system = this.settings.system;
    const messages = turns.map((turn) => {
      if (turn.role === "user") return { role: "user", content: withFiles(turn.text, turn.files) };
      if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.text };
      return { role: "assistant", content: turn.text, ...(turn.calls.length && { tool_calls: turn.calls }) };
    });
    if (system) messages.unshift({ role: "system", content: system });
    return ["v1/chat/completions", { ...body, ...(probs && { logprobs: true, top_logprobs: 5 }), messages }];
  }

  async send() {
    const text = $("prompt").value, editing = this.editing, { turns } = this.chat;
    if (this.running || (!text.trim() && !this.files.files.length)) return;
    const files = this.files.take();
    $("prompt").value = "";
    this.editing = null;
    this.edit(null);
    const turn = { role: "user", text, ...(files.length && { files }) };
    const good = await this.ask(editing ? turns.indexOf(editing) : turns.length, [turn]);
    if (!good && !$("prompt").value && !this.files.files.length) {
      $("prompt").value = text;
      this.files.set(files);
    }
  }

  // Keeps the first `keep` turns, adds `more` and asks for the next one; what stood there stays as another version.
  // What fails leaves the conversation as it was.
  async ask(keep, more) {
    if (this.running) return false;
    const chat = this.chat, before = chat.turns, turns = [...before.slice(0, keep), ...more];
    const asked = { path: "", body: {} };
    $("note").textContent = "";
    try {
      [asked.path, asked.body] = this.request(turns);
    } catch (error) {
      $("note").textContent = error.message;
      return false;
    }
    chat.system = this.settings.system; // what it was asked with, whatever stands in the field when the answer is there
    for (const view of [...chat.views.splice(keep), ...this.leftovers.splice(0)]) view.element.remove();
    chat.turns = turns;
    this.results();
    const answer = { role: "assistant", text: "", thoughts: "", calls: [] };
    const view = this.answer(answer, turns.at(-1), asked.body.response_format !== undefined);
    const fresh = [...more.map((turn, i) => this.draw(turn, keep + i)), view];
    $("log").append(...fresh.map((each) => each.element));
    this.hint();
    this.down();
    const failed = await this.stream(asked, answer, view);
    if (failed) {
      chat.turns = before;
      if (this.chat !== chat) return false;
      if (keep < before.length) this.show();
      else this.results();
      this.leftovers = fresh;
      $("log").append(...fresh.map((each) => each.element));
      this.hint();
      this.down();
      return false;
    }
    chat.turns = branch(before, keep, [...more, answer]);
    chat.views.push(...fresh);
    this.keep(chat);
    if (this.chat !== chat) return true;
    const near = this.near();
    if (keep < before.length) this.pager(keep);
    this.results();
    if (near) this.down();
    return true;
  }

  keep(chat = this.chat) {
    const { id, kind, system, turns } = chat;
    if (chat.kept) $("note").textContent = store.save({ id, kind, system, model: this.model(), when: Date.now(), turns });
  }

  // Reads the answer into `answer` and its view. True: nothing came, and it is not the model that decided so.
  async stream({ path, body }, answer, view) {
    this.running = new AbortController();
    this.busy(true);
    view.begin();
    announce("The model answers");
    const sent = performance.now();
    let first = null, last = null, usage = null, reason = null;
    try {
      for await (const event of post(path, body, this.running.signal)) {
        if (event.usage) usage = event.usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        const delta = choice.delta ?? { content: choice.text };
        const piece = delta.content || "", thought = delta.reasoning_content || "";
        addCalls(answer.calls, delta.tool_calls);
        if (piece || thought || choice.logprobs || delta.tool_calls) { last = performance.now(); first ??= last; }
        answer.text += piece;
        answer.thoughts += thought;
        reason = choice.finish_reason || reason;
        const near = this.near();
        view.update(piece, choice.logprobs);
        if (near) this.down();
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else {
        if (error instanceof ApiError && error.status === 401) this.wantKey();
        answer.error = error.message;
      }
    }
    const near = this.near();
    answer.facts = facts({ sent, first, last, usage, reason });
    view.end();
    if (near) this.down();
    const said = answer.error || answer.text || answer.calls.map((call) => "Call of " + call.function.name).join(", ");
    announce(said.length > SPOKEN ? said.slice(0, SPOKEN) + " … and more" : said || "The answer is empty");
    this.running = null;
    this.busy(false);
    const nothing = !answer.text && !answer.thoughts && !answer.calls.length;
    return nothing && (answer.error !== undefined || reason === "stopped");
  }

  // Calls of the last answer wait for what the tools gave back.
  results() {
    for (const view of this.chat.views) view.closeResults?.();
    const last = this.chat.turns.at(-1), view = this.chat.views.at(-1);
    if (last?.calls?.length && view?.askForResults) {
      view.askForResults((texts) => this.ask(this.chat.turns.length, texts.map((text, i) => {
        const call = last.calls[i];
        return { role: "tool", id: call.id, name: call.function.name, text };
      })));
    }
  }

  busy(yes) {
    $("stop").hidden = !yes;
    $("send").disabled = yes;
    if (!yes && (document.activeElement === document.body || document.activeElement === $("stop"))) $("prompt").focus();
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
