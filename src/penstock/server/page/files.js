// Text files that go into the prompt. They are read here and sent as a part of the message, as if they had been typed.

import { $, announce, button, element, fenced } from "./dom.js";

const MOST_BYTES = 256 * 1024, MOST_TOGETHER = 512 * 1024;

const size = (bytes) => (bytes < 1000 ? bytes + " B" : bytes < 1e6 ? (bytes / 1000).toFixed(0) + " kB" : (bytes / 1e6).toFixed(1) + " MB");

// Raises an error whose text says what to change.
async function read(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${size(file.size)}, more than the ${size(MOST_BYTES)} that can be attached: attach a part of it.`);
  }
  let text = null;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch { /* not UTF-8 */ }
  if (text === null || text.includes("\0")) {
    throw new Error(`${file.name} is not text in UTF-8: attach plain text, such as .txt, .md, .csv or source code.`);
  }
  return { name: file.name, text, bytes: file.size };
}

// The message with its files before it.
export function withFiles(text, files = []) {
  const parts = files.map((file) => `File ${file.name}:\n${fenced(file.text.replace(/\n$/, ""))}`);
  return [...parts, text].filter(Boolean).join("\n\n");
}

export function chip(file) {
  return element("span", "chip", `${file.name} `, element("small", "", size(file.bytes)));
}

export class Attachments {
  constructor() {
    this.files = [];
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", async () => {
      await this.add($("files").files);
      $("files").value = "";
    });
    const form = $("ask");
    form.addEventListener("dragover", (e) => {
      e.preventDefault();
      form.classList.add("over");
    });
    form.addEventListener("dragleave", () => form.classList.remove("over"));
    form.addEventListener("drop", (e) => {
      e.preventDefault();
      form.classList.remove("over");
      this.add(e.dataTransfer.files);
    });
    $("prompt").addEventListener("paste", (e) => {
      if (!e.clipboardData.files.length) return;
      e.preventDefault();
      this.add(e.clipboardData.files);
    });
  }

  async add(files) {
    $("note").textContent = "";
    for (const file of files) {
      try {
        const found = await read(file);
        const together = this.files.reduce((sum, f) => sum + f.bytes, found.bytes);
        if (together > MOST_TOGETHER) {
          throw new Error(`With ${file.name} the files have ${size(together)}, more than ${size(MOST_TOGETHER)}: leave one out.`);
        }
        this.set([...this.files, found]);
        announce("Attached " + file.name);
      } catch (error) {
        $("note").textContent = error.message;
      }
    }
    $("prompt").focus();
  }

  set(files) {
    this.files = files;
    $("attached").replaceChildren(...files.map((file) => {
      const made = element("li", "", chip(file));
      made.append(button("×", () => this.set(this.files.filter((f) => f !== file)), "Remove " + file.name));
      return made;
    }));
    $("attached").hidden = !files.length;
  }

  take() {
    const taken = this.files;
    this.set([]);
    return taken;
  }
}
