// The processes behind the server as tiles, and what happened to them.

import { byId, make } from "./dom.js";

const MARKS = { ready: "●", starting: "◐", lost: "✕" };
const MOST_EVENTS = 6;

export class Processes {
  constructor() {
    this._states = new Map(); // by name, of the last look
  }

  read(status) {
    if (status === null) return;
    const found = processesOf(status);
    this._noteChanges(found);
    byId("tiles").replaceChildren(...found.map(tileOf));
  }

  _noteChanges(found) {
    for (const { name, state } of found) {
      const before = this._states.get(name);
      if (before !== undefined && before !== state) note(`${name} ${wording(before, state)}`, state);
    }
    this._states = new Map(found.map(({ name, state }) => [name, state]));
  }
}

/** Every process once: what its starter knows and what the engine sees of it, the worse of both. */
function processesOf({ engine, cluster }) {
  const found = new Map();
  const take = ({ role, rank = 0, state, ...more }) => {
    const name = `${role} ${rank}`;
    const known = found.get(name) ?? { role, name, state };
    found.set(name, { ...known, ...more, state: worse(known.state, state) });
  };
  for (const each of cluster?.processes ?? []) {
    take({ ...each, where: each.gpu_ids.length ? `GPU ${each.gpu_ids.join(", ")}` : each.node });
  }
  for (const each of engine?.ranks ?? []) take({ ...each, where: each.device });
  for (const each of engine?.models ?? []) {
    take({ role: each.role, state: "ready", pid: each.pid, where: `${each.device}, in the engine` });
  }
  if (![...found.values()].some(({ role }) => role === "engine")) {
    return [{ name: "engine 0", role: "engine", state: engine ? "ready" : "lost" }, ...found.values()];
  }
  return [...found.values()];
}

function worse(one, other) {
  const order = ["ready", "starting", "lost"];
  return order[Math.max(order.indexOf(one), order.indexOf(other))] ?? other;
}

function tileOf({ name, state, where, pid, restarts }) {
  const parts = [where, pid && `pid ${pid}`, restarts ? `started anew ${restarts} ×` : ""];
  return make(
    "li",
    { class: "tile", data: { state, name } },
    make("span", { class: "tile-mark", "aria-hidden": "true" }, MARKS[state] ?? "?"),
    make("span", { class: "tile-name" }, name),
    make("span", { class: "tile-state" }, state),
    make("span", { class: "tile-more faint" }, parts.filter(Boolean).join(" · ")),
  );
}

function wording(before, state) {
  if (state === "lost") return "was lost";
  if (state === "ready") return "is back";
  return before === "lost" ? "is starting anew" : "is starting";
}

function note(sentence, state) {
  const time = new Date().toLocaleTimeString([], { hour12: false });
  byId("events").prepend(make("li", { data: { state } }, make("time", {}, time), ` ${sentence}`));
  while (byId("events").children.length > MOST_EVENTS) byId("events").lastChild.remove();
}
