// Tokens coloured by how likely they were; what else could have been there on hover, tap or arrow keys.

import { element } from "./dom.js";

const tip = document.getElementById("tip");
const LIMITS = [0.9, 0.5, 0.2, 0.05];
const NAMES = ["over 90 %", "over 50 %", "over 20 %", "over 5 %", "less"];

const percent = (logprob) => {
  const p = Math.exp(logprob) * 100;
  return (p >= 10 ? p.toFixed(0) : p >= 0.1 ? p.toFixed(1) : "< 0.1") + " %";
};
const level = (logprob) => {
  const found = LIMITS.findIndex((limit) => Math.exp(logprob) >= limit);
  return found < 0 ? LIMITS.length : found;
};
// A token as one line that shows its spaces.
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";

// Chat's and completions' logprobs in one shape: [{token, logprob, others: [[token, logprob], ...]}].
function entries(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((e) => ({
      token: e.token, bytes: e.bytes, logprob: e.logprob, others: (e.top_logprobs || []).map((o) => [o.token, o.logprob]),
    }));
  }
  return (logprobs.tokens || []).map((token, i) => ({
    token, logprob: logprobs.token_logprobs[i] ?? 0, others: Object.entries(logprobs.top_logprobs?.[i] || {}),
  }));
}

// A text cut where its tokens end. Alone a token may lack the space before it; what is not found goes to the last.
export function split(text, tokens) {
  let at = 0;
  return tokens.map((token, i) => {
    const found = text.indexOf(token, at);
    let end = found >= 0 && text.slice(at, found).trim() === "" ? found + token.length : at;
    if (i === tokens.length - 1) end = text.length;
    const part = text.slice(at, end);
    at = end;
    return part;
  });
}

export class TokenView {
  constructor() {
    this.element = element("span", "tokens");
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", "Answer, token by token; arrow keys show probabilities");
    this.entries = [];
    this.at = -1;
    this.element.addEventListener("pointerover", (e) => this.point(e.target));
    this.element.addEventListener("click", (e) => this.point(e.target));
    this.element.addEventListener("pointerleave", () => this.hide());
    this.element.addEventListener("blur", () => this.hide());
    this.element.addEventListener("keydown", (e) => this.key(e));
  }

  // What is shown is the text; it may come without a token (a character of several tokens), or a token without text.
  add(logprobs, piece) {
    const fresh = entries(logprobs), parts = split(piece, fresh.map((e) => e.token));
    fresh.forEach((entry, i) => {
      const span = element("span", "token p" + level(entry.logprob), parts[i]);
      span.dataset.at = this.entries.length;
      this.entries.push(entry);
      this.element.append(span);
    });
    if (!fresh.length && piece) this.element.append(piece);
  }

  point(target) {
    if (target.dataset?.at !== undefined) this.select(Number(target.dataset.at));
  }

  key(e) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (step && this.entries.length) {
      e.preventDefault();
      this.select(Math.max(0, Math.min(this.entries.length - 1, this.at + step)));
    } else if (e.key === "Escape") this.hide();
  }

  select(at) {
    this.hide();
    this.at = at;
    const span = this.element.querySelector(`[data-at="${at}"]`), entry = this.entries[at];
    span.classList.add("on");
    const table = element("table");
    const rows = entry.others.some(([t]) => t === entry.token) ? entry.others : [[entry.token, entry.logprob], ...entry.others];
    for (const [token, logprob] of [...rows].sort((a, b) => b[1] - a[1])) {
      const row = element("tr", token === entry.token ? "chosen" : "");
      row.append(element("td", "", visible(token)), element("td", "", percent(logprob)));
      table.append(row);
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const box = span.getBoundingClientRect();
    const left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
    const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = left + scrollX + "px";
    tip.style.top = (below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + scrollY + "px";
  }

  hide() {
    tip.hidden = true;
    this.element.querySelector(".on")?.classList.remove("on");
  }

  scale() {
    const found = element("div", "scale", "chosen with probability ");
    NAMES.forEach((name, i) => found.append(element("span", "token p" + i, name), " "));
    return found;
  }
}
