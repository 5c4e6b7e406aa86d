// Versions of a message: editing or regenerating one keeps what stood there, with all that followed.
// The first turn of what is shown has `others`: the tails of the other versions in their order, null at its own place.

import { announce, button, element } from "./dom.js";

// The turns with those from `at` on replaced by `tail`; what was there becomes another version.
export function branch(turns, at, tail) {
  const before = turns.slice(at);
  if (!before.length) return [...turns, ...tail];
  const { others = [null], ...head } = before[0];
  const kept = others.map((other) => other ?? [head, ...before.slice(1)]);
  tail[0].others = [...kept, null]; // the same turn: what is drawn refers to it
  return [...turns.slice(0, at), ...tail];
}

// The turns with version `to` of the one at `at`.
export function turned(turns, at, to) {
  const { others, ...head } = turns[at], [first, ...rest] = others[to];
  const kept = others.map((other, i) => (i === to ? null : other ?? [head, ...turns.slice(at + 1)]));
  return [...turns.slice(0, at), { ...first, others: kept }, ...rest];
}

// Arrows to the other versions of `turn` in the actions of what is `shown`. `go(i)`: version i is wanted.
export function pager(shown, turn, go) {
  const count = turn.others?.length ?? 1;
  if (count < 2) return;
  const at = turn.others.indexOf(null), to = (i) => { if (i >= 0 && i < count) go(i); };
  const earlier = button("‹", () => to(at - 1), "Earlier version"), later = button("›", () => to(at + 1), "Later version");
  earlier.disabled = at === 0;
  later.disabled = at === count - 1;
  const made = element("div", "pager", earlier, element("span", "", `${at + 1}/${count}`), later);
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", `Version ${at + 1} of ${count}`);
  made.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!step) return;
    e.preventDefault();
    to(at + step);
  });
  shown.querySelector(".actions").prepend(made);
}

// Says which version is shown, and leaves the focus on the arrow that led there, or at the end on the other.
export function arrived(shown, forward) {
  const made = shown.querySelector(".pager"), [earlier, later] = made.querySelectorAll("button");
  made.scrollIntoView({ block: "nearest" });
  (later.disabled || (!forward && !earlier.disabled) ? earlier : later).focus();
  announce(made.getAttribute("aria-label"));
}
