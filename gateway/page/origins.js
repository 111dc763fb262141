// Where a token came from: names, and what is said of one.

import { count, make, percent, quoted } from "./dom.js";

/** In the order of the legend. Whoever else drafts looks like the draft. */
export const ORIGINS = {
  draft: { name: "Accepted draft", note: "guessed by the draft model, and what the target says too" },
  ngram: { name: "N-gram", note: "copied from earlier in the text, and what the target says too" },
  recovered: { name: "Recovered", note: "the target's own, in place of a draft it did not accept" },
  bonus: { name: "Bonus", note: "the target's own, for free after all drafts were accepted" },
  target: { name: "Target", note: "the target's own, nothing was drafted" },
};

/** The class of colour and line of an origin. */
export function lookOf(origin) {
  return origin in ORIGINS ? origin : "draft";
}

export function legend() {
  return Object.entries(ORIGINS).map(([look, { name, note }]) =>
    make("li", { title: `${name}: ${note}` }, make("span", { class: "token", data: { look } }, name)),
  );
}

/** One piece of text as a sentence. */
export function describePiece({ text, origin, round }) {
  const { name, note } = ORIGINS[origin] ?? { name: origin, note: "drafted, and what the target says too" };
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
