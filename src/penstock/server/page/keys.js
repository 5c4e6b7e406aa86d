// The keyboard: Enter and Escape everywhere, and single keys where nobody is writing (they can be turned off).

import { $ } from "./dom.js";
import { read, write } from "./store.js";

export function listen(play, history) {
  const single = $("single");
  single.checked = read("single") ?? true;
  single.addEventListener("change", () => write("single", single.checked));
  $("keys-open").addEventListener("click", () => $("keys").showModal());
  $("keys-close").addEventListener("click", () => $("keys").close());

  const acts = {
    "/": () => $("prompt").focus(),
    n: () => { play.begin(); $("prompt").focus(); },
    h: () => history.show(),
    e: () => play.editLast(),
    r: () => play.regenerate(),
    c: () => [...document.querySelectorAll(".turn.model .actions button")].findLast((b) => b.textContent === "Copy")?.click(),
    "?": () => $("keys").showModal(),
  };

  $("prompt").addEventListener("keydown", (e) => {
    if (e.isComposing) return;
    if (e.key === "Enter" && !e.shiftKey) {
      e.preventDefault();
      play.send();
    } else if (e.key === "ArrowUp" && !$("prompt").value && !e.shiftKey) {
      e.preventDefault();
      play.editLast();
    }
  });

  document.addEventListener("keydown", (e) => {
    if (e.isComposing || e.defaultPrevented || document.querySelector("dialog[open]")) return; // a dialog has keys of its own
    if (e.key === "Escape") {
      if (play.running) play.stop();
      else if (play.editing) play.edit(null);
      else if (document.activeElement === $("prompt")) $("talk").focus();
      return;
    }
    const writing = /^(?:INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName) && e.target.type !== "checkbox";
    if (writing || !single.checked || e.ctrlKey || e.metaKey || e.altKey || !acts[e.key]) return;
    e.preventDefault();
    acts[e.key]();
  });
}
