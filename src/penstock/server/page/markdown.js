// Markdown as elements. HTML in it stays text, and what the library makes is sanitised before it becomes elements: no
// scripts, handlers, styles, forms, images or frames, and links only to the web and to mail.

import { copyButton, element } from "./dom.js";
import hljs from "./vendor/highlight/core.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const LONGEST = 200_000; // characters; longer texts are shown as they are
const LONGEST_CODE = 50_000;
const LANGUAGES = ["bash", "c", "cpp", "css", "diff", "go", "ini", "java", "javascript", "json", "markdown", "python", "rust",
  "sql", "typescript", "xml", "yaml"];
const ALSO = {
  sh: "bash", shell: "bash", zsh: "bash", console: "bash", "c++": "cpp", cc: "cpp", hpp: "cpp", h: "c", html: "xml", svg: "xml",
  toml: "ini", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "typescript", tsx: "typescript", py: "python",
  python3: "python", md: "markdown", rs: "rust", yml: "yaml", golang: "go", patch: "diff", jsonl: "json", jsonc: "json",
};
const PLAIN_TAG = /^<\/?(?:br|sub|sup|kbd|mark|ins|del|small|u)\s*\/?>$/i;
const OUR_CLASS = /^(?:language-[\w+#.-]+|hljs-[\w-]+|[a-z]+_)$/;
const RULES = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "ins", "kbd", "li",
    "mark", "ol", "p", "pre", "small", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul"],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html({ text, block }) {
      if (PLAIN_TAG.test(text.trim())) return text;
      return block ? `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>` : escaped(text);
    },
    image: ({ text, href }) => escaped(`[image: ${text || href}]`),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  const kept = [...node.classList].filter((name) => OUR_CLASS.test(name));
  if (kept.length) node.className = kept.join(" ");
  else node.removeAttribute("class");
  if (node.nodeName === "A" && node.hasAttribute("href")) {
    node.setAttribute("rel", "noopener noreferrer nofollow");
    node.setAttribute("target", "_blank");
    node.setAttribute("title", node.getAttribute("href"));
  }
});

// HTML as a fragment with nothing in it that acts, loads or decides how the page looks.
export function sanitise(html) {
  return DOMPurify.sanitize(html, RULES);
}

const loading = {};

// Resolves to the name of a language that is ready, or to null.
function language(name) {
  const known = ALSO[name] || name;
  if (!LANGUAGES.includes(known)) return null;
  loading[known] ??= import(`./vendor/highlight/${known}.js`).then((module) => {
    hljs.registerLanguage(known, module.default);
    return known;
  });
  return hljs.getLanguage(known) ? known : loading[known];
}

function colour(code, text, name) {
  code.replaceChildren(sanitise(hljs.highlight(text, { language: name, ignoreIllegals: true }).value));
}

// Gives code its name, colours and a button, and lets wide things be moved by keyboard.
function finish(fragment) {
  for (const code of fragment.querySelectorAll("pre > code")) {
    const pre = code.parentElement, text = code.textContent.replace(/\n$/, "");
    const name = [...code.classList].find((c) => c.startsWith("language-"))?.slice(9).toLowerCase() || "";
    const box = element("div", "code"), bar = element("div", "bar", element("span", "", name));
    bar.append(copyButton(() => text, "code"));
    pre.replaceWith(box);
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", name ? "Code: " + name : "Code");
    box.append(bar, pre);
    const ready = text.length <= LONGEST_CODE ? language(name) : null;
    if (typeof ready === "string") colour(code, text, ready);
    else ready?.then((found) => colour(code, text, found)).catch(() => {});
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", "wide");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

function block(token) {
  const node = element("div", "block");
  if (token.plain) node.append(element("div", "text", token.raw));
  else node.append(finish(sanitise(marked.parser([token]))));
  return { raw: token.raw, node };
}

// A text that grows. Only blocks that changed are drawn again, and drawing takes at most a fifth of the time.
export class MarkdownView {
  constructor() {
    this.element = element("div", "text markdown");
    this.blocks = [];
    this.free = 0;
    this.timer = null;
    this.text = "";
  }

  update(text) {
    this.text = text;
    const wait = this.free - performance.now();
    if (wait <= 0) this.draw();
    else this.timer ??= setTimeout(() => this.draw(), wait);
  }

  // The whole text: what was drawn before may have links whose targets came later.
  end(text) {
    this.text = text;
    this.draw(true);
  }

  draw(afresh = false) {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    const tokens = this.text.length > LONGEST ? [{ raw: this.text, plain: true }] : marked.lexer(this.text);
    const shown = tokens.filter((token) => token.type !== "space");
    let same = 0;
    while (!afresh && same < shown.length && this.blocks[same]?.raw === shown[same].raw) same += 1;
    for (const old of this.blocks.splice(same)) old.node.remove();
    for (const token of shown.slice(same)) {
      const made = block(token);
      this.blocks.push(made);
      this.element.append(made.node);
    }
    const ended = performance.now();
    this.free = ended + 4 * (ended - began);
  }
}
