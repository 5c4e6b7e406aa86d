// What the page remembers: conversations, parameters and system prompts, in this browser's localStorage and nowhere else.

const ALL = "penstock-", CHAT = "penstock-chat-", CURRENT = "penstock-current";
export const MOST_CHATS = 100, MOST_CHARS = 2_000_000;

function parsed(text) {
  try {
    return text === null ? null : JSON.parse(text);
  } catch {
    return null;
  }
}

function keys(start) {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(start));
  } catch {
    return []; // a browser that keeps nothing
  }
}

// Newest first: [{id, when, size, turns, ...}].
export function chats() {
  const found = [];
  for (const key of keys(CHAT)) {
    const text = localStorage.getItem(key), chat = parsed(text);
    if (Array.isArray(chat?.turns)) found.push({ ...chat, id: key.slice(CHAT.length), size: text.length });
  }
  return found.sort((a, b) => b.when - a.when);
}

// Keeps a conversation and forgets the oldest ones beyond the bounds. Returns why it could not, or "".
export function save(chat) {
  const text = JSON.stringify(chat);
  if (text.length > MOST_CHARS) {
    return `This conversation has more than ${MOST_CHARS.toLocaleString("en")} characters: it is not kept in the history.`;
  }
  const others = chats().filter((other) => other.id !== chat.id);
  let room = MOST_CHARS - text.length;
  others.forEach((other, i) => {
    room -= other.size;
    if (room < 0 || i + 1 >= MOST_CHATS) remove(others.splice(i, 1, null)[0].id);
  });
  const kept = others.filter(Boolean);
  for (;;) {
    try {
      localStorage.setItem(CHAT + chat.id, text);
      sessionStorage.setItem(CURRENT, chat.id);
      return "";
    } catch {
      if (!kept.length) return "This browser keeps no history: it gives the page no storage.";
      remove(kept.pop().id); // the browser's own bound is nearer
    }
  }
}

export function load(id) {
  try {
    const chat = parsed(localStorage.getItem(CHAT + id));
    return Array.isArray(chat?.turns) ? { ...chat, id } : null;
  } catch {
    return null;
  }
}

export function remove(id) {
  localStorage.removeItem(CHAT + id);
}

// The conversation that this tab shows; it comes back when the tab is reloaded.
export function current(id) {
  try {
    if (id === undefined) return sessionStorage.getItem(CURRENT);
    if (id === null) sessionStorage.removeItem(CURRENT);
    else sessionStorage.setItem(CURRENT, id);
  } catch { /* a browser that keeps nothing */ }
  return id ?? null;
}

export function read(name) {
  try {
    return parsed(localStorage.getItem(ALL + name));
  } catch {
    return null;
  }
}

export function write(name, value) {
  try {
    localStorage.setItem(ALL + name, JSON.stringify(value));
  } catch { /* a browser that keeps nothing, or no more */ }
}

// Everything, saved prompts and parameters too.
export function clear() {
  for (const key of keys(ALL)) localStorage.removeItem(key);
  current(null);
}

// Calls `gone` when another tab has deleted a conversation.
export function onDeleted(gone) {
  addEventListener("storage", (e) => {
    if (e.key?.startsWith(CHAT) && e.newValue === null) gone(e.key.slice(CHAT.length));
  });
}
