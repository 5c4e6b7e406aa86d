import { get, setKey } from "./api.js";
import { $, element } from "./dom.js";
import { EngineView } from "./engine.js";
import { History } from "./history.js";
import { listen } from "./keys.js";
import { Playground } from "./play.js";
import { read, write } from "./store.js";

const EVERY_MS = 1000;
let timer = 0, served = "", several = false;

function wantKey() {
  $("metrics").hidden = true; // a link cannot take the key along
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

const view = new EngineView();
const play = new Playground({ model: () => $("model").value, wantKey });
const history = new History({
  open: (chat) => play.open(chat),
  deleted: (id) => play.forget(id),
  cleared: () => play.cleared(),
  current: () => play.chat.id,
});
listen(play, history);

// The models that may be asked. The one chosen last stays chosen.
async function models() {
  const { data } = await get("v1/models");
  const wanted = $("model").value || read("model");
  $("model").replaceChildren(...data.map(({ id }) => Object.assign(element("option", "", id), { value: id })));
  if (data.some(({ id }) => id === wanted)) $("model").value = wanted;
}

async function look() {
  clearTimeout(timer);
  let wait = EVERY_MS;
  try {
    const about = several && $("model").value ? "&model=" + encodeURIComponent($("model").value) : "";
    const state = await get("internal/state?points=" + view.wanted + about);
    several = state.models.length > 1;
    const found = state.models.map(({ name }) => name).join() || state.model;
    if (found !== served) {
      await models();
      served = found;
    }
    // A model that is not in memory starts with the first message: its name says so.
    for (const option of $("model").options) {
      const one = state.models.find(({ name }) => name === option.value);
      option.textContent = option.value + (one && several && one.state !== "ready" ? ` (${one.state})` : "");
    }
    play.allowChat(state.chat);
    play.settings.defaults = state.sampling;
    view.show(state);
    $("key-form").hidden = true;
  } catch (error) {
    if (error.status === 401) {
      view.badge("needs a key", "bad");
      wantKey();
      return; // until there is one
    }
    view.badge(error.status ? error.message : "not reachable", "bad");
    served = ""; // another server may answer next
    several = false;
    wait = 3 * EVERY_MS;
  }
  if (!document.hidden) timer = setTimeout(look, wait);
}

$("model").addEventListener("change", () => {
  write("model", $("model").value);
  if (several) look();
});
$("key-form").addEventListener("submit", async (e) => {
  e.preventDefault();
  setKey($("key").value.trim());
  $("key-note").textContent = "";
  await look();
  if (!$("key-form").hidden) $("key-note").textContent = "It does not take this key.";
  else $("prompt").focus();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
$("settings").open = matchMedia("(min-width: 60rem) and (min-height: 60rem)").matches;
look();
