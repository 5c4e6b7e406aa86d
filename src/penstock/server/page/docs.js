// The viewer of openapi.json. The key is the playground's: it stays in this tab.

import { get, key, setKey } from "./api.js";
import { $ } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

function shade() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

async function show() {
  $("note").textContent = "";
  let spec = null;
  try {
    spec = await get("openapi.json");
  } catch (error) {
    if (error.status !== 401) {
      $("note").textContent = error.message;
      return;
    }
    $("document").hidden = true; // a link cannot take the key along
    $("key-note").textContent = key() ? "It does not take this key." : "";
    $("key-form").hidden = false;
    $("key").focus();
    return;
  }
  $("key-form").hidden = true;
  globalThis.SwaggerUIBundle({
    spec: { ...spec, servers: [{ url: new URL(".", location.href).href.replace(/\/$/, "") }] },
    domNode: $("viewer"),
    deepLinking: false, // it would put links into buttons
    docExpansion: "list",
    defaultModelsExpandDepth: -1, // they stand with the operations
    validatorUrl: null,
    supportedSubmitMethods: ["get", "post", "delete", "put", "patch"],
    requestInterceptor(request) {
      if (key()) request.headers.authorization ??= "Bearer " + key();
      return request;
    },
  });
}

// What the viewer leaves without a name of its own, or out of reach of the keyboard.
new MutationObserver(() => {
  const all = (what) => $("viewer").querySelectorAll(what), path = (part) => part.closest(".opblock")?.querySelector("[data-path]")?.dataset.path ?? "";
  for (const field of all("textarea:not([aria-label])")) field.setAttribute("aria-label", "Request body");
  for (const table of all(".responses-table:not([aria-label])")) table.setAttribute("aria-label", "Responses of " + path(table));
  for (const text of all("pre:not([tabindex])")) text.tabIndex = 0;
}).observe($("viewer"), { childList: true, subtree: true });

$("key-form").addEventListener("submit", (e) => {
  e.preventDefault();
  setKey($("key").value.trim());
  show();
});
dark.addEventListener("change", shade);
shade();
show();
