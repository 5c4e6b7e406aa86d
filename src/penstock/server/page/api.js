// Requests to this server: the key, errors as OpenAI writes them, server-sent events.

const KEY = "penstock-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

export function key() {
  return sessionStorage.getItem(KEY);
}

function headers(body) {
  const found = {};
  if (key()) found.authorization = "Bearer " + key();
  if (body) found["content-type"] = "application/json";
  return found;
}

async function checked(answer) {
  if (answer.ok) return answer;
  let message = answer.status + " " + answer.statusText;
  try {
    message = (await answer.json()).error.message;
  } catch { /* not an error of ours */ }
  throw new ApiError(answer.status, message);
}

export async function get(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  return (await checked(answer)).json();
}

// Yields the parsed events of a streamed answer. Aborting `signal` ends it with an AbortError.
export async function* post(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: headers(true), body: JSON.stringify(body), signal });
  const reader = (await checked(answer)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(500, parsed.error.message);
      yield parsed;
    }
  }
}
