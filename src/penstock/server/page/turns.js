// How messages look: what the user said, what the model answered, and what a tool gave back.

import { button, copyButton, element, fenced } from "./dom.js";
import { chip } from "./files.js";
import { MarkdownView } from "./markdown.js";
import { TokenView } from "./tokens.js";

const LONG_NUMBER = /\d{16}|\d[eE][+-]?\d/;

// JSON with line breaks; where a number would not survive being read, or it is no JSON, as it is.
function pretty(text) {
  if (LONG_NUMBER.test(text)) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// Text as it is, with the same two methods as a MarkdownView.
class PlainView {
  constructor() {
    this.element = element("span", "text");
  }

  update(text) {
    const shown = this.element.textContent.length;
    if (text.length > shown) this.element.append(text.slice(shown));
  }

  end(text) {
    this.update(text);
  }
}

function turn(kind, name) {
  const made = element("article", "turn " + kind);
  made.setAttribute("aria-label", name);
  return made;
}

export function userTurn(said, edit) {
  const made = turn("user", "You");
  const text = element("div", "text", said.text);
  if (said.files?.length) text.prepend(element("div", "chips", ...said.files.map(chip)));
  made.append(text, element("div", "actions", copyButton(() => said.text, "your message"), button("Edit", edit, "Edit your message")));
  return made;
}

export function toolTurn(result) {
  const made = turn("tool", "Result of " + result.name);
  const shown = new MarkdownView();
  shown.end(fenced(pretty(result.text), isJson(result.text) ? "json" : ""));
  made.append(element("div", "what", "Result of ", element("code", "", result.name)), shown.element);
  return made;
}

// An answer that grows. `answer`: {text, thoughts, calls, facts, error}; `given`: the text that a completion goes on with.
export class AnswerView {
  constructor(answer, { given = null, asJson = false, actions }) {
    this.answer = answer;
    this.asJson = asJson;
    this.actions = actions;
    this.given = given;
    this.element = turn("model", "Model");
    this.thoughts = null;
    this.calls = [];
    this.tokens = null;
    if (given !== null) this.element.append(element("span", "text given", given));
    this.body = given === null ? new MarkdownView() : new PlainView();
    this.element.append(this.body.element);
  }

  begin() {
    this.element.classList.add("busy");
    this.element.setAttribute("aria-busy", "true");
  }

  // `piece` and `logprobs`: what is new, for the view by tokens; all else is in the answer.
  update(piece, logprobs) {
    const { text, thoughts, calls } = this.answer;
    if (thoughts) this.think(thoughts);
    if (logprobs && !this.tokens) {
      this.tokens = new TokenView();
      this.body.element.replaceWith(this.tokens.element);
    }
    if (this.tokens) this.tokens.add(logprobs, piece);
    else if (text) this.body.update(this.asJson ? fenced(text, "json") : text);
    calls.forEach((call, i) => this.call(call, i).update(fenced(call.function.arguments, "json")));
  }

  think(text) {
    if (!this.thoughts) {
      this.thoughts = { box: element("details", "thoughts", element("summary", "", "Thinking")), view: new PlainView() };
      this.thoughts.view.element.classList.add("given");
      this.thoughts.box.append(this.thoughts.view.element);
      this.element.prepend(this.thoughts.box);
    }
    this.thoughts.view.update(text);
  }

  call(call, i) {
    if (!this.calls[i]) {
      const view = new MarkdownView();
      const box = element("div", "call", element("div", "what", "Call of ", element("code", "", call.function.name)), view.element);
      (this.calls[i - 1]?.box || this.tokens?.element || this.body.element).after(box);
      this.calls[i] = Object.assign(view, { box });
    }
    return this.calls[i];
  }

  end() {
    const { text, thoughts, calls, facts, error } = this.answer;
    this.element.classList.remove("busy");
    this.element.removeAttribute("aria-busy");
    if (thoughts) {
      this.think(thoughts);
      this.thoughts.box.firstChild.textContent = "Thoughts";
    }
    calls.forEach((call, i) => this.call(call, i).end(fenced(pretty(call.function.arguments), "json")));
    if (this.tokens) this.element.append(this.tokens.scale());
    else if (this.given !== null) this.body.end(text);
    else this.body.end(isJson(text) || this.asJson ? fenced(pretty(text), "json") : text);
    if (error) this.element.append(element("div", "error", error));
    if (facts) this.element.append(element("div", "facts", facts));
    const row = element("div", "actions");
    if (text) row.append(copyButton(() => (this.given ?? "") + text, "the answer"));
    for (const [name, action, label] of this.actions) row.append(button(name, action, label));
    this.element.append(row);
  }

  // Fields for what the tools gave back. `send` gets a list of texts, one for each call.
  askForResults(send) {
    const form = element("form", "results");
    const fields = this.answer.calls.map((call) => {
      const field = element("textarea");
      field.rows = 2;
      form.append(element("label", "", `Result of ${call.function.name}`, field));
      return field;
    });
    form.append(element("button", "", fields.length > 1 ? "Send results" : "Send result"));
    form.addEventListener("submit", (e) => {
      e.preventDefault();
      send(fields.map((field) => field.value));
    });
    this.element.append(form);
    this.form = form;
  }

  closeResults() {
    this.form?.remove();
    this.form = null;
  }
}
