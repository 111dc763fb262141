// A map of the server's processes: a box for each replica and one for the gateways, with a tile for
// each process by node; and the latest changes of their states.

import { byId, make, percent } from "./dom.js";

const MARKS = { ready: "●", starting: "◐", lost: "✕" };
const MAX_EVENTS = 6;

export class Processes {
  constructor() {
    this._states = new Map(); // by name, at the last poll
  }

  read(status) {
    if (status === null) return;
    const boxes = boxesOf(status);
    const named = boxes.flatMap(({ label, tiles }) => tiles.map((tile) => ({ ...tile, label })));
    this._noteChanges(named);
    byId("tiles").replaceChildren(...boxes.map((box) => boxOf(box, boxes.length > 1)));
  }

  _noteChanges(found) {
    const full = ({ label, name }) => (label ? `${label}: ${name}` : name);
    for (const each of found) {
      const before = this._states.get(full(each));
      if (before !== undefined && before !== each.state) {
        note(`${full(each)} ${wording(before, each.state)}`, each.state);
      }
    }
    this._states = new Map(found.map((each) => [full(each), each.state]));
  }
}

/** The gateways, then every replica with its processes; a lone replica shares their box. */
function boxesOf({ engine, cluster, replicas }) {
  const processes = cluster?.processes ?? [];
  const gateways = processesOf(processes.filter(({ role }) => role === "gateway"));
  const others = processes.filter(({ role }) => role !== "gateway");
  if (!(replicas?.length > 1)) {
    return [{ label: "", tiles: [...gateways, ...tilesOf(others, engine)], replica: null }];
  }
  const boxes = replicas.map((replica) => ({
    label: `replica ${replica.name}`,
    tiles: tilesOf(others.filter((each) => each.replica === replica.name), replica.engine),
    replica,
  }));
  return gateways.length ? [{ label: "gateways", tiles: gateways, replica: null }, ...boxes] : boxes;
}

/** The tiles of one replica; always with its engine. */
function tilesOf(processes, engine) {
  const found = processesOf(processes, engine);
  if (found.some(({ role }) => role === "engine")) return found;
  return [{ name: "engine 0", role: "engine", state: engine ? "ready" : "lost" }, ...found];
}

/** Every process once, with the worse of the states that its controller and the engine report. */
function processesOf(processes, engine) {
  const found = new Map();
  const take = ({ role, rank = 0, state, ...more }) => {
    const name = `${role} ${rank}`;
    const known = found.get(name) ?? { role, name, state };
    const node = known.node ?? more.node; // the engine knows hosts by other names
    found.set(name, { ...known, ...more, node, state: worse(known.state, state) });
  };
  for (const each of processes) {
    take({ ...each, where: each.gpu_ids.length ? `GPU ${each.gpu_ids.join(", ")}` : "" });
  }
  for (const each of engine?.ranks ?? []) take({ ...each, node: each.host, where: each.device });
  for (const each of engine?.models ?? []) {
    const where = `${each.device}, in the engine`;
    take({ role: each.role, state: "ready", pid: each.pid, node: each.host, where });
  }
  return [...found.values()];
}

function worse(one, other) {
  const order = ["ready", "starting", "lost"];
  return order[Math.max(order.indexOf(one), order.indexOf(other))] ?? other;
}

function boxOf({ label, tiles, replica }, isOneOfMany) {
  const nodes = new Map();
  for (const tile of tiles) {
    const node = tile.node ?? "";
    nodes.set(node, [...(nodes.get(node) ?? []), tile]);
  }
  const parts = [...nodes].map(([node, own]) =>
    make(
      "li",
      { class: "map-node" },
      nodes.size > 1 || isOneOfMany ? make("p", { class: "map-host faint" }, node) : "",
      make("ul", { class: "tiles" }, ...own.map(tileOf)),
    ),
  );
  return make(
    "li",
    { class: "map-box", data: { name: label, state: replica?.state ?? "" } },
    isOneOfMany ? make("h3", {}, label, " ", make("span", { class: "faint" }, summaryOf(replica))) : "",
    make("ul", { class: "map-nodes" }, ...parts),
  );
}

/** A replica's state and load, in one line. */
function summaryOf(replica) {
  if (replica === null) return "";
  const { state, load, restarts, engine } = replica;
  const parts = [state, `${load} active`];
  if (engine?.kv_blocks) parts.push(`KV ${percent(engine.kv_blocks_used / engine.kv_blocks)}`);
  if (engine?.drafted_tokens) {
    parts.push(`accepted ${percent(engine.accepted_tokens / engine.drafted_tokens)}`);
  }
  if (restarts) parts.push(`restarted ${restarts} ×`);
  return parts.join(" · ");
}

function tileOf({ name, state, where, pid, restarts }) {
  const parts = [where, pid && `pid ${pid}`, restarts ? `restarted ${restarts} ×` : ""];
  return make(
    "li",
    { class: "tile", data: { state, name } },
    make("span", { class: "tile-mark", "aria-hidden": "true" }, MARKS[state] ?? "?"),
    make("span", { class: "tile-name" }, name),
    make("span", { class: "tile-more faint" }, parts.filter(Boolean).join(" · ")),
    make("span", { class: "tile-state" }, state),
  );
}

function wording(before, state) {
  if (state === "lost") return "was lost";
  if (state === "ready") return "is back";
  return before === "lost" ? "is restarting" : "is starting";
}

function note(sentence, state) {
  const time = new Date().toLocaleTimeString([], { hour12: false });
  byId("events").prepend(make("li", { data: { state } }, make("time", {}, time), ` ${sentence}`));
  while (byId("events").children.length > MAX_EVENTS) byId("events").lastChild.remove();
}
