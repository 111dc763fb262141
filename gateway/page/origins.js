// Where a token came from: names, and what is said of one.

import { byId, count, make, percent, quoted } from "./dom.js";

/** In the order of the legend. Whoever else drafts looks like the draft. */
export const ORIGINS = {
  draft: { name: "Accepted draft", note: "guessed by the draft model, confirmed by the target" },
  ngram: { name: "N-gram", note: "copied from earlier in the text, confirmed by the target" },
  recovered: { name: "Recovered", note: "the target's own, in place of a wrong guess" },
  bonus: { name: "Bonus", note: "the target's own, for free after guesses that were all right" },
  target: { name: "Target", note: "the target's own, nothing was guessed" },
};

/** The class of colour and line of an origin. */
export function lookOf(origin) {
  return origin in ORIGINS ? origin : "draft";
}

/** The colours and, until something is asked or wherever the reader wants it, what they mean. */
export class Legend {
  constructor() {
    this._isReaders = false; // whether the reader has said which way it is to be
    const items = Object.entries(ORIGINS).map(([look, { name, note }]) =>
      make(
        "li",
        { title: `${name}: ${note}` },
        make("span", { class: "token", data: { look } }, name),
        make("span", { class: "note" }, note),
      ),
    );
    byId("legend").append(...items);
    byId("legend-toggle").addEventListener("click", () => {
      this._isReaders = true;
      this._show(!byId("legend").classList.contains("is-told"));
    });
  }

  /** With its notes where there is room for them, or in a line beside an answer. */
  suggest(isTold) {
    if (!this._isReaders) this._show(isTold && matchMedia("(min-width: 720px)").matches);
  }

  _show(isTold) {
    byId("legend").classList.toggle("is-told", isTold);
    byId("legend-toggle").setAttribute("aria-expanded", isTold);
  }
}

/** One piece of text as a sentence. */
export function describePiece({ text, origin, round }) {
  const { name, note } = ORIGINS[origin] ?? { name: origin, note: "guessed, confirmed by the target" };
  return `${quoted(text)} · ${name.toLowerCase()} · round ${round + 1} · ${note}.`;
}

/** What happened in a round: "Round 7 of 20: 4 drafted, 3 accepted, then “the” instead." */
export function describeRound(number, total, round, pieces) {
  const start = `Round ${number + 1} of ${total}:`;
  const own = pieces.findLast((each) => ["recovered", "bonus", "target"].includes(each.origin));
  if (round.verified === 0) {
    return `${start} nothing drafted, ${own ? quoted(own.text) : "a token"} by the target alone.`;
  }
  const judged = `${start} ${round.verified} drafted, ${round.accepted} accepted`;
  if (!own || round.tokens <= round.accepted) return `${judged}; the text ends there.`;
  return round.accepted < round.verified
    ? `${judged}, then ${quoted(own.text)} instead.`
    : `${judged}, then ${quoted(own.text)} as a bonus.`;
}

/** The whole of a text in a line. */
export function describeStats(answer) {
  const { rounds, numTokens, seconds } = answer;
  const parts = [count(numTokens, "token"), count(rounds.length, "round")];
  if (seconds) parts.push(`${seconds.toFixed(1)} s`, `${(numTokens / seconds).toFixed(1)} tokens/s`);
  if (rounds.length) parts.push(`${(numTokens / rounds.length).toFixed(2)} tokens a round`);
  const rate = answer.stats?.draft_acceptance_rate;
  if (Number.isFinite(rate) && rounds.some((each) => each.verified)) {
    parts.push(`${percent(rate)} of drafts accepted`);
  }
  return parts.join(" · ");
}
