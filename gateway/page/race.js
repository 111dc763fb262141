// The same request with and without speculation, timed, and their texts compared.

import { byId, fixed } from "./dom.js";

const PATH = "v1/chat/completions";
const LANES = ["with", "without"];

/** One after the other, speculation first, so that the warm prefix cache does not favour it; or at
 * once. Both get the same seed, so both must give the same text at any temperature. */
export async function runRace(answers, body, isAtOnce, signal) {
  const seed = body.seed ?? Math.floor(Math.random() * 2 ** 31);
  const bodies = {
    with: { ...body, seed, speculation: body.speculation === "off" ? undefined : body.speculation },
    without: { ...body, seed, speculation: "off", num_speculative_tokens: undefined },
  };
  for (const lane of LANES) {
    byId(`text-${lane}`).replaceChildren(answers[lane].element);
    byId(`time-${lane}`).textContent = "waiting";
    byId(`bar-${lane}`).style.width = "0";
  }
  byId("verdict").textContent = "";
  byId("verdict").dataset.equal = "";
  const watching = setInterval(() => showLanes(answers, body.max_tokens), 100);
  try {
    const run = (lane) => answers[lane].run(PATH, bodies[lane], signal);
    if (isAtOnce) await Promise.all(LANES.map(run));
    else for (const lane of LANES) await run(lane);
    showVerdict(answers);
  } finally {
    clearInterval(watching);
    for (const lane of LANES) byId(`time-${lane}`).textContent = "–";
    showLanes(answers, body.max_tokens);
  }
}

function showLanes(answers, maxTokens) {
  const expected = maxTokens ?? Math.max(...LANES.map((lane) => answers[lane].numTokens));
  for (const lane of LANES) {
    const { numTokens, seconds, finishReason } = answers[lane];
    const share = finishReason ? 1 : numTokens / Math.max(expected, 1);
    byId(`bar-${lane}`).style.width = `${Math.min(share, 1) * 100}%`;
    if (numTokens) byId(`time-${lane}`).textContent = timeOf(numTokens, seconds);
  }
}

function timeOf(numTokens, seconds) {
  return `${fixed(seconds, 2)} s · ${fixed(numTokens / seconds)} tokens/s · ${numTokens} tokens`;
}

function showVerdict({ with: fast, without: plain }) {
  const at = firstDifference(fast.text, plain.text);
  const ratio = plain.seconds / plain.numTokens / (fast.seconds / fast.numTokens);
  const pace =
    ratio >= 1 ? `${fixed(ratio, 2)}\u00a0× as fast with speculation` : `${fixed(1 / ratio, 2)}\u00a0× as fast without`;
  byId("verdict").dataset.equal = at === -1;
  byId("verdict").textContent =
    at === -1
      ? `Both texts are equal. ${pace}.`
      : `The texts differ from character ${at + 1} on: rounding decided a near-tie, which deterministic serving rules out. ${pace}.`;
}

/** The first place where two texts differ; -1 if there is none. */
function firstDifference(one, other) {
  if (one === other) return -1;
  const longest = Math.max(one.length, other.length);
  for (let at = 0; at < longest; at++) if (one[at] !== other[at]) return at;
  return longest;
}
