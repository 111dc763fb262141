// Origins of tokens: their names and descriptions.

import { byId, count, make, percent, quoted } from "./dom.js";

/** In the order of the legend. Other proposers look like the draft model. */
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

/** The legend; expanded with its notes until the first prompt, or as the user toggles it. */
export class Legend {
  constructor() {
    this._isUsers = false; // whether the user has toggled it
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
      this._isUsers = true;
      this._show(!byId("legend").classList.contains("is-expanded"));
    });
  }

  /** Expand where there is room, unless the user has toggled it. */
  suggest(isExpanded) {
    if (!this._isUsers) this._show(isExpanded && matchMedia("(min-width: 720px)").matches);
  }

  _show(isExpanded) {
    byId("legend").classList.toggle("is-expanded", isExpanded);
    byId("legend-toggle").setAttribute("aria-expanded", isExpanded);
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
  const verified = `${start} ${round.verified} drafted, ${round.accepted} accepted`;
  if (!own || round.tokens <= round.accepted) return `${verified}; the text ends there.`;
  return round.accepted < round.verified
    ? `${verified}, then ${quoted(own.text)} instead.`
    : `${verified}, then ${quoted(own.text)} as a bonus.`;
}

/** Statistics of a whole text, in one line. */
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
