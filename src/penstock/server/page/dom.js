// What every part of the page uses. Text becomes text nodes; only markdown.js makes markup, and sanitises it.

export const $ = (id) => document.getElementById(id);

export function element(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

// `label`: the name for screen readers where the text alone does not say what the button is about.
export function button(text, action, label) {
  const made = element("button", "quiet", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

// Says something to screen readers.
export function announce(text) {
  $("said").textContent = text;
}

// Browsers have a clipboard only on https and localhost; elsewhere the old way still works.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element("textarea", "hidden", text), focused = document.activeElement;
  (document.querySelector("dialog[open]") || document.body).append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  focused?.focus();
  if (!done) throw new Error("the browser does not let this page copy");
}

// A button that copies what `text` gives, and says so.
export function copyButton(text, what) {
  const made = button("Copy", async () => {
    let said = "Copied";
    try {
      await copy(text());
    } catch {
      said = "Not copied";
    }
    made.textContent = said;
    announce(`${said}: ${what}`);
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  }, "Copy " + what);
  return made;
}

// Text as a block of code in Markdown, whatever it contains.
export function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) || []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

// Offers a text as a file.
export function save(name, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
