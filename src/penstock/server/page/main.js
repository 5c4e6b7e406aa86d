import { get, setKey } from "./api.js";
import { EngineView } from "./engine.js";
import { Playground } from "./play.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
let model = "", timer = 0;

function wantKey() {
  document.querySelector("nav").hidden = true; // links cannot take the key along
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

const view = new EngineView();
const play = new Playground({ model: () => model, wantKey });

async function look() {
  clearTimeout(timer);
  let wait = EVERY_MS;
  try {
    const state = await get("internal/state?points=" + view.wanted);
    model = state.model;
    play.allowChat(state.chat);
    view.show(state);
    $("key-form").hidden = true;
  } catch (error) {
    if (error.status === 401) {
      view.badge("needs a key", "bad");
      wantKey();
      return; // until there is one
    }
    view.badge(error.status ? error.message : "not reachable", "bad");
    wait = 3 * EVERY_MS;
  }
  if (!document.hidden) timer = setTimeout(look, wait);
}

$("key-form").addEventListener("submit", async (e) => {
  e.preventDefault();
  setKey($("key").value.trim());
  $("key-note").textContent = "";
  await look();
  if (!$("key-form").hidden) $("key-note").textContent = "It does not take this key.";
  else $("prompt").focus();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
$("settings").open = matchMedia("(min-width: 60rem)").matches;
look();
