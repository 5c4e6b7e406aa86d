// The fields under Parameters: what they say to the server, and that they are as they were after a reload.

import { $, element } from "./dom.js";
import { read, write } from "./store.js";

const SHAPING = ["temperature", "top_p", "top_k", "min_p"]; // naming one of these can change what the others are
const NUMBERS = [...SHAPING, "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "stops", "system", "format", "schema", "tools"];
const COMPLETION_TOKENS = 128; // where the field is empty; the API's own default of 16 is short for reading
const WHOSE = {
  model: "An empty field is what the model's own files say.",
  mild: "The model's files give no defaults: with all four empty, the server samples mildly; with one filled in, the others are neutral.",
  neutral: "An empty field leaves the model's distribution as it is.",
};

function json(id, what) {
  const text = $(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON (${error.message}): correct it under Parameters.`);
  }
}

export class Settings {
  constructor() {
    this.prompts = read("prompts") || [];
    this.sampling = null;
    this.kind = "chat";
    const kept = read("parameters") || {};
    for (const id of FIELDS) {
      if (kept[id] !== undefined) $(id).value = kept[id];
      $(id).addEventListener("change", () => this.keep());
    }
    for (const id of SHAPING) $(id).addEventListener("input", () => this.placeholders());
    $("format").addEventListener("change", () => this.show());
    $("prompt-save").addEventListener("click", () => this.savePrompt());
    $("prompt-delete").addEventListener("click", () => this.setPrompts(this.prompts.filter((p) => p !== this.chosen())));
    $("prompts").addEventListener("change", () => {
      $("system").value = this.chosen() ?? $("system").value;
      this.show();
      this.keep();
    });
    $("system").addEventListener("input", () => this.show());
    this.list();
  }

  keep() {
    write("parameters", Object.fromEntries(FIELDS.map((id) => [id, $(id).value])));
  }

  show() {
    $("schema-box").hidden = $("format").value !== "json_schema";
    const at = this.prompts.indexOf($("system").value.trim());
    $("prompts").value = at < 0 ? "" : String(at);
    $("prompt-save").disabled = at >= 0 || !$("system").value.trim();
    $("prompt-delete").disabled = at < 0;
  }

  // What the server does where a field is empty, as /internal/state has it.
  set defaults(sampling) {
    if (JSON.stringify(sampling) === JSON.stringify(this.sampling)) return;
    this.sampling = sampling;
    this.placeholders();
  }

  placeholders(kind = this.kind) {
    this.kind = kind;
    const chat = kind === "chat", { silent, beside, whose } = this.sampling ?? {};
    const values = SHAPING.some((id) => $(id).value !== "") ? beside : silent;
    for (const id of SHAPING) $(id).placeholder = values?.[id] ?? "";
    $("max_tokens").placeholder = chat ? values?.max_tokens ?? "what fits" : COMPLETION_TOKENS;
    $("defaults").textContent = WHOSE[whose] ?? "";
  }

  chosen() {
    return this.prompts[$("prompts").value];
  }

  savePrompt() {
    this.setPrompts([...this.prompts, $("system").value.trim()].slice(-50));
  }

  setPrompts(prompts) {
    this.prompts = prompts;
    write("prompts", prompts);
    this.list();
  }

  list() {
    const first = element("option", "", this.prompts.length ? "saved prompts" : "none saved");
    first.value = "";
    $("prompts").replaceChildren(first, ...this.prompts.map((text, i) => {
      const made = element("option", "", text.length > 60 ? text.slice(0, 59) + "…" : text);
      made.value = String(i);
      return made;
    }));
    this.show();
  }

  get system() {
    return $("system").value.trim();
  }

  set system(text) {
    $("system").value = text;
    this.show();
  }

  // As after a fresh installation.
  reset() {
    for (const id of FIELDS) {
      const field = $(id);
      if (field.tagName === "SELECT") field.selectedIndex = 0;
      else field.value = field.defaultValue;
    }
    this.prompts = [];
    this.list();
    this.placeholders();
  }

  // What the fields say; empty ones are left to the server. Raises an error whose text says what to change.
  request(kind) {
    const found = {};
    for (const name of NUMBERS) {
      const value = $(name).value.trim();
      if (value !== "") found[name] = Number(value);
    }
    const stops = $("stops").value.split("\n").filter((s) => s !== "").map((s) => s.replaceAll("\\n", "\n"));
    if (stops.length) found.stop = stops;
    if (kind === "completion") found.max_tokens ??= COMPLETION_TOKENS;
    const format = $("format").value;
    if (format === "json_object") found.response_format = { type: format };
    if (format === "json_schema") {
      const schema = json("schema", "The JSON schema");
      if (schema === null) throw new Error("The JSON schema is empty: write one under Parameters, or choose another format.");
      found.response_format = { type: format, json_schema: { name: "answer", schema } };
    }
    if (kind === "chat") {
      const tools = json("tools", "The list of tools");
      if (tools !== null) found.tools = Array.isArray(tools) ? tools : [tools];
    }
    return found;
  }
}
