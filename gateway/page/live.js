// The server's live status: polled every second, less often while it does not respond.

import { getJson } from "./api.js";
import { showFound, showLost } from "./banner.js";
import { byId, fixed, percent } from "./dom.js";
import { Plot } from "./plots.js";

const EVERY_S = 1;
const LONGEST_S = 15;
const TIMEOUT_MS = 10_000;

/** Passes every status to `readers`, and null when there is none. */
export class Live {
  constructor(readers) {
    this._readers = readers;
    this._pause = EVERY_S;
    this._timer = null;
    this._isPolling = false;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.ask();
    });
  }

  /** Poll now, then on schedule. */
  async ask() {
    if (this._isPolling) return;
    this._isPolling = true;
    clearTimeout(this._timer);
    try {
      const status = await getJson("outrider/status", AbortSignal.timeout(TIMEOUT_MS));
      this._pause = EVERY_S;
      showFound();
      this._publish(status);
    } catch (error) {
      this._pause = Math.min(this._pause * 2, LONGEST_S);
      showLost(error, this._pause);
      this._publish(null);
    } finally {
      this._isPolling = false;
      this._timer = setTimeout(() => this._next(), this._pause * 1000);
    }
  }

  _next() {
    if (!document.hidden) this.ask();
  }

  _publish(status) {
    for (const read of this._readers) read(status);
  }
}

/** The pill beside the title and the line of facts. */
export function showState(status) {
  const state = status?.state ?? "no connection";
  byId("state").textContent = state;
  byId("state").dataset.state = state;
  const settings = status?.settings;
  if (!settings) return;
  const parts = [
    `Outrider ${status.version}`,
    status.model,
    settings.draft && `draft ${settings.draft}`,
    `context ${settings.max_model_len}`,
    settings.deterministic && "deterministic",
    `up ${duration(status.uptime_s)}`,
  ];
  byId("facts").textContent = parts.filter(Boolean).join(" · ");
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${fixed(seconds / 3600)} h`;
}

/** The plots; rates come from counters, which restart with the engine. */
export class Plots {
  constructor() {
    this._speed = new Plot("Tokens/s", { lines: ["tokens"], least: 10, shown: (v) => fixed(v) });
    this._acceptance = new Plot("Drafts accepted", { lines: ["share"], top: 1, shown: (v) => percent(v) });
    this._depth = new Plot("Drafts a round", { lines: ["drafts"], least: 4, shown: (v) => fixed(v) });
    this._load = new Plot("Running, waiting", {
      lines: ["running", "waiting"],
      least: 4,
      shown: (running, waiting) => (running === null ? "–" : `${running}, ${waiting}`),
    });
    this._kv = new Plot("KV cache in use", { lines: ["share"], top: 1, shown: (v) => percent(v) });
    this._last = null; // counters and when they were read
    const all = [this._speed, this._acceptance, this._depth, this._load, this._kv];
    byId("plots").append(...all.map((plot) => plot.element));
  }

  read(status) {
    const engine = status?.engine;
    const speculation = engine?.speculation;
    this._speed.push(this._rate(engine));
    this._acceptance.push(speculation?.acceptance ?? null);
    this._depth.push(speculation?.drafting_share ? speculation.mean_depth : null);
    this._load.push(engine?.running ?? null, engine?.waiting ?? null);
    this._kv.push(engine ? engine.kv_blocks_used / Math.max(engine.kv_blocks, 1) : null);
  }

  _rate(engine) {
    const last = this._last;
    const now = { tokens: engine?.committed_tokens, at: performance.now() };
    this._last = engine ? now : null;
    if (!engine || !last) return null;
    return Math.max(now.tokens - last.tokens, 0) / ((now.at - last.at) / 1000);
  }
}
