// Replays an answer round by round: a strip of its rounds, a slider, buttons, keys.

import { byId, draw } from "./dom.js";
import { describePiece, describeRound, describeStats, lookOf } from "./origins.js";

const TALLEST = 34; // of the strip, in its own units
const NARROWEST = 5; // columns, in pixels
const WIDEST = 22;
const PLAY_MS = 450;

export class Stepper {
  constructor() {
    this._root = byId("stepper");
    this._strip = byId("rounds");
    this._slider = byId("round");
    this._line = byId("told");
    this._answer = null;
    this._number = null; // null: the whole text
    this._timer = null;
    this._slider.addEventListener("input", () => this._go(Number(this._slider.value) - 1));
    byId("first").addEventListener("click", () => this._go(0));
    byId("back").addEventListener("click", () => this._step(-1));
    byId("forth").addEventListener("click", () => this._step(1));
    byId("whole").addEventListener("click", () => this._go(null));
    byId("play").addEventListener("click", () => this._togglePlay());
    this._root.addEventListener("keydown", (event) => this._onKey(event));
    this._strip.addEventListener("click", (event) => {
      const column = event.target.closest("[data-round]");
      if (column) this._go(Number(column.dataset.round));
    });
  }

  /** Replay this answer. */
  attach(answer) {
    if (this._answer === answer) return;
    this._stop();
    this._answer?.showUntil(null);
    this._answer = answer;
    this._number = null;
    this.refresh();
  }

  /** The answer has grown. */
  refresh() {
    const total = this._answer?.rounds.length ?? 0;
    this._root.hidden = total === 0;
    if (total === 0) return;
    this._drawStrip();
    this._slider.max = total;
    this._show();
  }

  /** Describe a piece; without one, the round or the whole text. */
  showPiece(piece) {
    this._line.textContent = piece ? describePiece(piece) : this._sentence();
    this._strip.querySelector(".is-pointed")?.classList.remove("is-pointed");
    if (piece) this._column(piece.round)?.classList.add("is-pointed");
  }

  _column(round) {
    return this._strip.querySelector(`[data-round="${round}"]`);
  }

  _sentence() {
    const { rounds, pieces } = this._answer;
    if (this._number === null) return describeStats(this._answer);
    const own = pieces.filter((piece) => piece.round === this._number);
    return describeRound(this._number, rounds.length, rounds[this._number], own);
  }

  _onKey(event) {
    if (event.target === this._slider && event.key !== "Escape") return; // the slider handles its keys
    const act = {
      ArrowLeft: () => this._step(-1),
      ArrowRight: () => this._step(1),
      Home: () => this._go(0),
      End: () => this._go(this._answer.rounds.length - 1),
      Escape: () => this._go(null),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  _step(by) {
    const last = this._answer.rounds.length - 1;
    const from = this._number ?? (by > 0 ? -1 : last + 1);
    this._go(Math.min(Math.max(from + by, 0), last));
  }

  _go(number) {
    if (number === null) this._stop();
    this._number = number;
    this._show();
  }

  _show() {
    const number = this._number;
    const total = this._answer.rounds.length;
    this._answer.showUntil(number);
    this._slider.value = number === null ? total : number + 1;
    this._strip.querySelector(".is-now")?.classList.remove("is-now");
    if (number !== null) this._column(number)?.classList.add("is-now");
    const box = this._strip.parentElement;
    const share = number === null ? 1 : (number + 0.5) / total;
    box.scrollLeft = share * box.scrollWidth - box.clientWidth / 2;
    const sentence = this._sentence();
    this._slider.setAttribute("aria-valuetext", sentence);
    this._line.textContent = sentence;
    byId("whole").disabled = number === null;
  }

  _togglePlay() {
    if (this._timer !== null) return this._stop();
    if (this._number === null || this._number >= this._answer.rounds.length - 1) this._go(0);
    byId("play").textContent = "Pause";
    this._timer = setInterval(() => {
      if (this._number >= this._answer.rounds.length - 1) this._stop();
      else this._step(1);
    }, PLAY_MS);
  }

  _stop() {
    clearInterval(this._timer);
    this._timer = null;
    byId("play").textContent = "Play";
  }

  // -- the strip: a column per round, with accepted drafts below, the target's own token on top,
  // and rejected drafts shaded

  _drawStrip() {
    const { rounds, pieces } = this._answer;
    const looks = rounds.map(() => ({ guess: "draft", own: "target" }));
    for (const { round, origin } of pieces) {
      if (!looks[round]) continue;
      const isOwn = ["recovered", "bonus", "target"].includes(origin);
      looks[round][isOwn ? "own" : "guess"] = lookOf(origin);
    }
    const deepest = Math.max(1, ...rounds.map((round) => Math.max(round.verified, round.tokens - 1) + 1));
    const unit = TALLEST / deepest;
    this._strip.style.minWidth = `${rounds.length * NARROWEST}px`;
    this._strip.style.maxWidth = `${rounds.length * WIDEST}px`;
    this._strip.setAttribute("viewBox", `0 0 ${rounds.length * 10} ${TALLEST}`);
    this._strip.replaceChildren(...rounds.map((round, at) => columnOf(round, at, unit, looks[at])));
  }
}

function columnOf(round, at, unit, { guess, own }) {
  const column = draw("g", { "data-round": at });
  const block = (from, height, kind) =>
    draw("rect", {
      x: at * 10 + 1.5,
      y: TALLEST - (from + height) * unit,
      width: 7,
      height: Math.max(height * unit - 1, 1),
      "data-look": kind,
    });
  column.append(draw("rect", { x: at * 10, y: 0, width: 10, height: TALLEST, class: "hit" }));
  const numOwn = Math.max(round.tokens - round.accepted, 0);
  const numOver = round.verified - round.accepted - numOwn; // without the one it replaces
  if (numOver > 0) column.append(block(round.accepted + numOwn, numOver, "rejected"));
  if (round.accepted) column.append(block(0, round.accepted, guess));
  if (numOwn) column.append(block(round.accepted, numOwn, own));
  return column;
}
