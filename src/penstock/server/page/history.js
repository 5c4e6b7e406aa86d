// The list of conversations that this browser keeps.

import { $, announce, button, element, save } from "./dom.js";
import { chats, clear, MOST_CHARS, MOST_CHATS, remove } from "./store.js";

const title = (chat) => {
  const first = chat.turns.find((turn) => turn.role === "user");
  const text = (first?.text || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > 70 ? text.slice(0, 69) + "…" : text || "Without a text";
};

export class History {
  // `open(chat)`, `deleted(id)` and `cleared()` are called when the user has decided so.
  constructor({ open, deleted, cleared, current }) {
    this.current = current;
    this.open = open;
    this.deleted = deleted;
    this.sure = false;
    $("history-bounds").textContent = `In this browser only: the newest ${MOST_CHATS} conversations, at most ${MOST_CHARS / 1e6} million characters.`;
    $("history-open").addEventListener("click", () => this.show());
    $("history-close").addEventListener("click", () => $("history").close());
    $("history-export").addEventListener("click", () => save("penstock-history.json", JSON.stringify(chats().map(({ size, ...chat }) => chat), null, 1)));
    $("history-delete").addEventListener("click", () => {
      if (!this.sure) {
        this.sure = true;
        $("history-delete").textContent = "Really delete everything?";
        return;
      }
      clear();
      cleared();
      announce("Everything that was kept is deleted");
      this.list();
    });
  }

  show() {
    this.list();
    $("history").showModal();
  }

  list() {
    this.sure = false;
    $("history-delete").textContent = "Delete all";
    const found = chats();
    $("chats").replaceChildren(...found.map((chat) => this.row(chat)));
    $("no-chats").hidden = found.length > 0;
    $("history-export").disabled = !found.length;
  }

  row(chat) {
    const name = title(chat), when = new Date(chat.when);
    const open = button(name, () => {
      $("history").close();
      this.open(chat);
    });
    open.className = "open";
    const about = `${when.toLocaleDateString()} ${when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false })}`;
    open.append(element("small", "", [about, chat.model, chat.kind === "completion" ? "completion" : ""].filter(Boolean).join(" · ")));
    if (chat.id === this.current()) open.setAttribute("aria-current", "true");
    const row = element("li", "", open);
    row.append(button("Delete", () => {
      remove(chat.id);
      this.deleted(chat.id);
      this.list();
      $("history-close").focus();
    }, "Delete: " + name));
    return row;
  }
}
