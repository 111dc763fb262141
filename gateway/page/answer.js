// A streamed text: its pieces coloured by origin, its rounds kept for the stepper.

import { make } from "./dom.js";
import { lookOf } from "./origins.js";
import { streamJson } from "./api.js";

/** `onChange` is called as it grows and ends, `onPick` with the picked piece, or null. */
export class Answer {
  constructor({ label = "Answer", onChange = () => {}, onPick = () => {} } = {}) {
    this.pieces = [];
    this.rounds = [];
    this.stats = null;
    this.finishReason = null;
    this.seconds = 0;
    this.firstTokenS = null;
    this.element = make("div", {
      class: "answer",
      tabindex: 0,
      role: "group",
      "aria-label": `${label}; the arrow keys go through its tokens`,
    });
    this._onChange = onChange;
    this._onPick = onPick;
    this._picked = -1;
    this._listen();
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  get numTokens() {
    return this.rounds.reduce((sum, round) => sum + round.tokens, 0);
  }

  /** Run a request and show its stream. Throws ServerError, or AbortError if stopped. */
  async run(path, body, signal) {
    const started = performance.now();
    this.element.classList.add("is-running");
    this.element.setAttribute("aria-busy", "true");
    try {
      for await (const chunk of streamJson(path, body, signal)) {
        this.seconds = (performance.now() - started) / 1000;
        this._take(chunk);
        this._onChange(this);
      }
    } finally {
      this.element.classList.remove("is-running");
      this.element.removeAttribute("aria-busy");
      this._onChange(this);
    }
  }

  _take(chunk) {
    const choice = chunk.choices?.[0];
    this.stats = choice?.speculation_stats ?? chunk.speculation_stats ?? this.stats;
    if (!choice) return;
    const text = choice.delta?.content ?? choice.text ?? "";
    const { pieces, rounds } = choice.speculation ?? {};
    if (rounds) this.rounds.push(...rounds);
    for (const piece of pieces ?? (text ? [{ text, origin: "target", round: 0 }] : [])) this._add(piece);
    if (this.pieces.length && this.firstTokenS === null) this.firstTokenS = this.seconds;
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }

  _add(piece) {
    if (piece.text === "") return;
    const index = this.pieces.push(piece) - 1;
    const data = { look: lookOf(piece.origin), round: piece.round, index };
    // The space before a word stays plain, so that words look like words.
    const [, space, word] = piece.text.match(/^( ?)(.*)$/s);
    const [before, shown] = word ? [space, word] : ["", piece.text];
    this.element.append(before, make("span", { class: "token", data }, shown));
  }

  // -- picking pieces

  _listen() {
    const tokenOf = (event) => event.target.closest?.(".token");
    this.element.addEventListener("pointerover", (event) => {
      const token = tokenOf(event);
      if (token) this.pick(Number(token.dataset.index));
    });
    this.element.addEventListener("pointerleave", () => this.pick(-1));
    this.element.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (token) this.pick(Number(token.dataset.index));
    });
    this.element.addEventListener("blur", () => this.pick(-1));
    this.element.addEventListener("keydown", (event) => this._onKey(event));
  }

  _onKey(event) {
    const last = this.pieces.length - 1;
    const next = {
      ArrowRight: Math.min(this._picked + 1, last),
      ArrowLeft: Math.max(this._picked - 1, 0),
      Home: 0,
      End: last,
      Escape: -1,
    }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.pick(next);
  }

  /** Pick a piece by its index; -1 is none. */
  pick(index) {
    if (index === this._picked) return;
    this.element.querySelector(".is-picked")?.classList.remove("is-picked");
    this._picked = index;
    this.element.children[index]?.classList.add("is-picked");
    this._onPick(this.pieces[index] ?? null, this);
  }

  /** Show the text as it was after a round; null is the whole. */
  showUntil(number) {
    this.element.classList.toggle("is-replayed", number !== null);
    for (const token of this.element.children) {
      const round = Number(token.dataset.round);
      token.classList.toggle("is-later", number !== null && round > number);
      token.classList.toggle("is-now", round === number);
    }
    this.element.querySelector(".is-now")?.scrollIntoView({ block: "nearest" });
  }
}
