// The speculation switch, and the accounts of the last steps.

import { getJson, postJson } from "./api.js";
import { showError } from "./banner.js";
import { byId, count, fixed, make, percent } from "./dom.js";

const POLICIES = {
  goodput: "Drafts only where that should be faster.",
  threshold: "Drafts less under load and where acceptance is low.",
  trim: "Drafts to the depth, verifies what is likely.",
  fixed: "Always drafts to the depth.",
  off: "Drafts nothing.",
};
const OFF = "off";
const NUM_STEPS = 24;
const STEPS_EVERY_MS = 2000;

export class Control {
  constructor() {
    this._lastOn = null; // the policy to go back to
    this._isChanging = false;
    this._stepsTimer = null;
    const options = Object.keys(POLICIES).map((value) => make("option", { value }, value));
    byId("policy").append(...options);
    byId("policy").addEventListener("change", () => this._set({ policy: byId("policy").value }));
    byId("bound").addEventListener("change", () => {
      const bound = byId("bound").value;
      this._set({ max_depth: bound === "" ? null : Number(bound) });
    });
    byId("switch").addEventListener("click", () => {
      const isOn = byId("switch").getAttribute("aria-checked") === "true";
      this._set({ policy: isOn ? OFF : (this._lastOn ?? "goodput") });
    });
    byId("steps-box").addEventListener("toggle", () => this._explain());
  }

  read(status) {
    const state = status?.engine?.speculation;
    for (const id of ["switch", "policy", "bound"]) byId(id).disabled = !state;
    if (!state) {
      byId("switch-told").textContent = "unknown while there is no engine";
      return;
    }
    if (!this._isChanging) this._show(state.settings);
    byId("switch-told").textContent = describe(state, status.settings?.method, status.engine.running);
    byId("warning").hidden = !state.warning;
    byId("warning").textContent = state.warning;
  }

  async _set(update) {
    this._isChanging = true;
    try {
      this._show(await postJson("outrider/speculation", update));
    } catch (error) {
      showError(error);
    } finally {
      this._isChanging = false;
    }
  }

  _show(settings) {
    const { policy, first_policy: first, max_depth: bound } = settings;
    if (policy !== OFF) this._lastOn = policy;
    else if (first !== OFF) this._lastOn ??= first;
    byId("switch").setAttribute("aria-checked", policy !== OFF);
    byId("policy-told").textContent = POLICIES[policy] ?? "";
    if (document.activeElement !== byId("policy")) byId("policy").value = policy;
    if (document.activeElement !== byId("bound")) byId("bound").value = bound ?? "";
  }

  // -- the last steps, while they are open

  async _explain() {
    clearTimeout(this._stepsTimer);
    if (!byId("steps-box").open) return;
    try {
      const { steps } = await getJson(`outrider/explain?last=${NUM_STEPS}`);
      const items = steps.reverse().map(stepOf);
      byId("steps").replaceChildren(...(items.length ? items : [make("li", {}, "No step yet.")]));
    } catch (error) {
      byId("steps").replaceChildren(make("li", {}, error.message));
    }
    this._stepsTimer = setTimeout(() => this._explain(), STEPS_EVERY_MS);
  }
}

/** The state of speculation in plain words. `method` is the proposer. */
function describe({ settings, gain, agreement, mean_depth: depth, drafting_share: share }, method, running) {
  if (method === OFF) return "No draft: --draft-model or --method ngram gives the server one.";
  const right = agreement === null ? "" : ` ${percent(agreement)} of tokens would have been guessed.`;
  if (settings.policy === OFF) return `Off: the model writes alone, and the same text.${right}`;
  if (share === 0) return running ? `On, but guessing does not pay now.${right}` : "On: ready to guess ahead.";
  const often = share >= 0.995 ? "Every pass" : `${percent(share)} of passes`;
  const guesses = `${fixed(depth).replace(".0", "")} guessed token${depth === 1 ? "" : "s"}`;
  const by = method === "ngram" ? " found in the text" : "";
  const pace = gain === null ? "" : `: about ${fixed(gain, 2)}\u00a0× the speed without`;
  return `${often} ${share >= 0.995 ? "checks" : "check"} ${guesses}${by}${pace}.`;
}

function stepOf(step) {
  const seconds = step.draft_s + step.verify_s;
  const parts = [
    count(step.num_rows, "row"),
    count(step.num_drafts, "draft"),
    step.committed === null ? null : `${count(step.committed, "token")} in ${fixed(seconds * 1000)} ms`,
  ];
  return make(
    "li",
    {},
    make("span", { class: "step-number" }, `#${step.step}`),
    ` ${parts.filter(Boolean).join(" · ")}`,
    make("span", { class: "faint step-reason" }, step.reason),
  );
}
