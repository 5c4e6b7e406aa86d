// The live view of the engine, drawn once a second from internal/state.

import { $, element } from "./dom.js";

const SHOWN = 120; // seconds
const CELLS = 240;

function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const time = (s) => (s == null ? "–" : s < 0.0995 ? (s * 1000).toFixed(1) + " ms" : s < 1 ? (s * 1000).toFixed(0) + " ms" : s.toFixed(2) + " s");

const mib = (bytes) => Math.round(bytes / 2 ** 20).toLocaleString("en") + " MiB";

const MISSES = { new: "new", evicted: "here once, evicted", tail: "behind the last whole block", not_read: "no cache wanted", lossy: "changed prompts" };

const span = (s) => (s < 60 ? s + " s" : s < 3600 ? s / 60 + " min" : s / 3600 + " h");

// In which bucket the middle one of all blocks is; figures: counts by bucket, and their sum in seconds.
function median(figures, bounds) {
  const counts = figures.slice(0, -1), all = counts.reduce((sum, n) => sum + n, 0);
  if (!all) return "";
  let seen = 0;
  const at = counts.findIndex((n) => (seen += n) * 2 >= all);
  return at < bounds.length ? "at most " + span(bounds[at]) : "more than " + span(bounds.at(-1));
}

export class EngineView {
  constructor() {
    this.points = [];
  }

  // Seconds of history to ask for: all at first, then what is new.
  get wanted() {
    return this.points.length ? 5 : SHOWN;
  }

  show(state) {
    document.title = state.model + " · Penstock";
    this.badge(state.unready ?? "ready", state.unready ? "bad" : "ready");
    const { load, engine } = state;
    $("running").replaceChildren(String(load.running), element("small", "", " of " + engine.max_num_seqs));
    $("waiting").textContent = load.waiting;
    $("saturation").textContent = Math.round(load.saturation * 100) + " %";
    $("restarts").textContent = state.restarts;
    this.drafts(state.speculation);
    this.blocks(state.kv, engine.block_size);
    this.tree(state.prefix);
    this.tiers(state.tiers);
    this.replicas(state.replicas);
    this.remember(state.history);
    this.charts(state.now_s);
    this.recent(state);
  }

  // Shown where the engine drafts: tokens per draft, and the share of drafts that were right.
  drafts(figures) {
    $("drafts").hidden = !figures;
    if (!figures) return;
    const { spec_decode_acceptance_length: length, spec_decode_acceptance_rate: rate } = figures;
    const note = length == null ? "none yet" : `${length.toFixed(2)} tokens per step that drafts, ${rate.toFixed(0)} % of drafts right`;
    $("drafts-note").textContent = note;
  }

  badge(text, kind) {
    const badge = $("state");
    if (badge.textContent !== text) badge.textContent = text;
    badge.className = "state " + kind;
  }

  blocks(kv, blockSize) {
    const per = Math.max(1, Math.ceil(kv.total / CELLS)), cells = Math.ceil(kv.total / per);
    const columns = 40, rows = Math.max(1, Math.ceil(cells / columns)), svg = $("kv");
    svg.setAttribute("viewBox", `0 0 ${columns * 10} ${rows * 10}`);
    svg.setAttribute("preserveAspectRatio", "none");
    const used = Math.ceil(kv.used / per), cached = Math.ceil((kv.used + kv.cached) / per);
    if (svg.childElementCount !== cells) {
      svg.replaceChildren(...Array.from({ length: cells }, (_, i) =>
        shape("rect", { x: (i % columns) * 10 + 0.8, y: Math.floor(i / columns) * 10 + 0.8, width: 8.4, height: 8.4, rx: 1.5 })));
    }
    [...svg.children].forEach((cell, i) => {
      const kind = i < used ? "used" : i < cached ? "cached" : "free";
      if (cell.getAttribute("class") !== kind) cell.setAttribute("class", kind);
    });
    let note = `${kv.used} of ${kv.total} blocks in use, ${kv.cached} cached`;
    if (kv.held_bytes != null && kv.limit_bytes != null) {
      note += `; ${mib(kv.held_bytes)} of at most ${mib(kv.limit_bytes)} taken`;
      if (kv.refusals) note += `, the machine had no more ${kv.refusals} times`;
    }
    $("kv-note").title = "The limit: " + kv.why;
    $("kv-cell").textContent = `; a cell is ${per * blockSize} tokens`;
    $("kv-note").textContent = note;
    svg.setAttribute("aria-label", note);
  }

  // Nodes come parents first: every leaf has a row, a node spans the rows of its leaves, its width is its length.
  tree(prefix) {
    const nodes = prefix.tree.map(([depth, blocks, holders]) => ({ depth, blocks, holders, row: 0, rows: 0 }));
    let row = 0, longest = 1;
    const path = [];
    nodes.forEach((node, i) => {
      path.length = node.depth;
      const parent = path[node.depth - 1];
      node.x = parent ? parent.x + parent.blocks : 0;
      node.row = row;
      path.push(node);
      longest = Math.max(longest, node.x + node.blocks);
      const leaf = !(nodes[i + 1]?.depth > node.depth);
      if (leaf) {
        row += 1;
        for (const each of path) each.rows = row - each.row;
      }
    });
    const svg = $("tree"), height = Math.max(8, row);
    svg.setAttribute("viewBox", `0 0 400 ${height * 10}`);
    svg.setAttribute("preserveAspectRatio", "none");
    const unit = 400 / Math.max(longest, 8);
    svg.replaceChildren(...nodes.map((n) => shape("rect", {
      x: n.x * unit + 0.5, y: n.row * 10 + 0.5, width: Math.max(1, n.blocks * unit - 1), height: n.rows * 10 - 1, rx: 1,
      class: n.holders ? "used" : "cached",
    })));
    const rate = prefix.queries ? Math.round((100 * prefix.hits) / prefix.queries) + " % of prompt tokens found" : "";
    $("tree-note").textContent = nodes.length ? rate : "empty";
    svg.classList.toggle("empty", !nodes.length);
    svg.toggleAttribute("hidden", !nodes.length);
    $("tree-legend").hidden = !nodes.length;
  }

  // Where blocks of prompts are kept, and why tokens of prompts were computed all the same.
  tiers({ tiers, misses, unread, ages, ages_s: bounds }) {
    $("tiers-head").hidden = $("tiers-box").hidden = !tiers.length;
    const whole = (n) => Math.round(n).toLocaleString("en");
    $("tiers").replaceChildren(...tiers.map((t) => {
      const row = element("tr");
      const cells = [t.name, whole(t.blocks), whole(t.limit_blocks), mib(t.num_bytes), whole(t.hit_tokens), whole(t.left), whole(t.pinned)];
      row.append(...cells.map((c) => element("td", "", c)));
      return row;
    }));
    const found = tiers.reduce((sum, t) => sum + t.hit_tokens, 0);
    const listed = Object.entries(misses).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
    const all = found + listed.reduce((sum, [, n]) => sum + n, 0);
    $("tiers-note").textContent = all && listed.length ? `${Math.round((100 * found) / all)} % of prompt tokens found` : "";
    const why = listed.map(([name, n]) => `${MISSES[name] ?? name} ${Math.round((100 * n) / all)} %`);
    const lines = why.length ? ["computed: " + why.join(", ")] : [];
    for (const [name, text] of [["found", "found after"], ["left", "left after"]]) {
      const half = median(ages[name] ?? [], bounds);
      if (half) lines.push(`${text} ${half} unused (half of the blocks)`);
    }
    const lost = Object.entries(unread).filter(([, n]) => n > 0).map(([name, n]) => `${name.replace(":", " ")} ${whole(n)}`);
    if (lost.length) lines.push("blocks that could not be read: " + lost.join(", "));
    $("tiers-why").textContent = lines.join("; ");
    $("tiers-why").hidden = !lines.length;
  }

  // The engines behind the server, where it may have several.
  replicas(engines) {
    $("replicas-head").hidden = $("replicas-box").hidden = !engines.length;
    const share = (part, of) => (of ? Math.round((100 * part) / of) + " %" : "–");
    $("replicas").replaceChildren(...engines.map((e) => {
      const row = element("tr");
      const cells = [e.number, e.host || "here", e.draining ? e.state + ", draining" : e.state, e.requests, e.running, e.waiting_tokens,
        share(e.kv_used, e.kv_total), share(e.hit_tokens, e.query_tokens), e.generated_tokens, e.restarts];
      row.append(...cells.map((c) => element("td", "", String(c))));
      return row;
    }));
    $("replicas-note").textContent = `${engines.filter((e) => e.state === "ready").length} of ${engines.length} ready`;
  }

  remember(history) {
    const last = this.points.at(-1)?.time_s ?? -Infinity;
    if (history.length && history.at(-1).time_s < last) this.points = []; // another server
    this.points.push(...history.filter((p) => p.time_s > last));
    this.points.splice(0, Math.max(0, this.points.length - SHOWN));
  }

  charts(now) {
    const last = this.points.at(-1);
    const known = (name) => this.points.findLast((p) => p[name] != null)?.[name];
    this.chart("tokens", now, ["generation_tokens_s"], (v) => v.toFixed(0));
    this.chart("requests", now, ["num_running", "num_waiting"], (v) => v.toFixed(0));
    this.chart("ttft", now, ["ttft_s"], time);
    this.chart("tpot", now, ["tpot_s"], time);
    $("now-tokens").textContent = last ? last.generation_tokens_s.toFixed(0) + " tokens/s" : "";
    $("now-requests").textContent = last ? `${last.num_running}, ${last.num_waiting}` : "";
    $("now-ttft").textContent = time(known("ttft_s"));
    $("now-tpot").textContent = time(known("tpot_s"));
  }

  // Lines join neighbouring seconds; latencies are dots too, since most seconds have none.
  chart(id, now, names, format) {
    const svg = $("chart-" + id), width = 200, height = 48;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    const largest = Math.max(0, ...this.points.flatMap((p) => names.map((n) => p[n] ?? 0)));
    const top = (largest || 1) * 1.15;
    const x = (p) => width - 3 - ((now - p.time_s) / SHOWN) * (width - 6), y = (v) => height - 4 - (v / top) * (height - 8);
    const paths = names.map((name, i) => {
      let line = "", dots = "", pen = false;
      for (const p of this.points) {
        if (p[name] == null) { pen = false; continue; }
        const at = `${x(p).toFixed(1)} ${y(p[name]).toFixed(1)}`;
        line += (pen ? "L" : "M") + at;
        if (name.endsWith("_s") && name !== "generation_tokens_s") dots += `M${at}h0.01`;
        pen = true;
      }
      const kind = i ? "line second" : "line";
      return [shape("path", { d: line, class: kind }), shape("path", { d: dots, class: kind + " dots" })];
    });
    svg.replaceChildren(...paths.flat());
    $("top-" + id).textContent = largest ? "max " + format(largest) : "";
  }

  recent(state) {
    $("no-recent").hidden = state.recent.length > 0;
    const rows = state.recent.toReversed().map((r) => {
      const row = element("tr");
      const at = new Date((state.unix_s - (state.now_s - r.time_s)) * 1000);
      const cells = [at.toLocaleTimeString([], { hour12: false }), r.endpoint.replace(/\.?completions/, "") || "text", r.prompt_tokens, r.cached_tokens,
        r.generated_tokens, time(r.ttft_s), time(r.tpot_s)];
      row.append(...cells.map((c) => element("td", "", String(c))));
      row.append(element("td", ["stop", "length", "repetition"].includes(r.ending) ? "" : "odd", r.ending.replace("_", " ")));
      return row;
    });
    $("recent").replaceChildren(...rows);
  }
}
