// The playground: a conversation, a completion or a race, with one form.

import { Answer } from "./answer.js";
import { hideBanner, showError } from "./banner.js";
import { byId, make } from "./dom.js";
import { runRace } from "./race.js";

const EXAMPLES = {
  chat: ["Why is the sky blue?", "Write a short poem about the sea.", "Count from one to thirty in words."],
  complete: ["The capital of France is", "Once upon a time there was", "def fibonacci(n):"],
  race: ["Explain how rainbows form.", "List the planets of the solar system, with a fact about each."],
};
const NEAR = 120; // pixels from the end within which the view follows the stream
const PLACEHOLDERS = {
  chat: "Ask anything",
  complete: "Begin a text, and the model continues it",
  race: "Ask once; it is answered with and without speculation",
};

export class Playground {
  constructor(stepper, legend) {
    this._stepper = stepper;
    this._legend = legend;
    this._messages = []; // of the conversation
    this._abort = null; // of what runs
    this._isStale = false; // a redraw of the stepper is scheduled
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this._abort?.abort());
    byId("clear").addEventListener("click", () => this._clear());
    for (const radio of document.getElementsByName("mode")) {
      radio.addEventListener("change", () => this._clear());
    }
    byId("settings").open = matchMedia("(min-width: 720px)").matches;
    this._clear();
  }

  get mode() {
    return document.querySelector("[name=mode]:checked").value;
  }

  /** The served models. */
  setModels(names) {
    const kept = byId("model").value;
    byId("model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(kept)) byId("model").value = kept;
    byId("model").title = names.join(", "); // a long one is cut
  }

  /** The server's sampling defaults. */
  setDefaults({ temperature = 1 }) {
    byId("temperature").placeholder = `${temperature}, by default`;
  }

  /** The proposers. */
  setMethods(names) {
    const select = byId("method");
    const kept = select.value;
    const [served, ...others] = select.options;
    if (others.length === names.length + 1) return;
    const options = names.map((name) => make("option", { value: name }, name));
    select.replaceChildren(served, ...options, others.at(-1));
    select.value = ["", "off", ...names].includes(kept) ? kept : "";
  }

  async _send() {
    const prompt = byId("prompt").value;
    if (this._abort || prompt.trim() === "") return;
    hideBanner();
    this._legend.suggest(false);
    byId("empty").hidden = true;
    this._abort = new AbortController();
    this._setRunning(true);
    try {
      if (this.mode === "race") await this._race(prompt);
      else await this._ask(prompt);
    } catch (error) {
      if (error.name !== "AbortError") showError(error);
    } finally {
      this._abort = null;
      this._setRunning(false);
    }
  }

  async _ask(prompt) {
    const isChat = this.mode === "chat";
    const answer = this._newAnswer(isChat ? "Answer" : "Continuation");
    const userPrompt = make("div", { class: "user-prompt" }, prompt);
    const turn = make("div", { class: isChat ? "turn" : "turn is-text" }, userPrompt, answer.element);
    byId("log").append(turn);
    turn.scrollIntoView({ block: "nearest" });
    byId("prompt").value = "";
    const message = { role: "user", content: prompt };
    const body = this._body(isChat ? { messages: [...this._messages, message] } : { prompt });
    try {
      await answer.run(isChat ? "v1/chat/completions" : "v1/completions", body, this._abort.signal);
    } catch (error) {
      if (answer.pieces.length === 0) {
        turn.remove();
        byId("prompt").value = prompt; // no output: keep the prompt for another try
      }
      throw error;
    } finally {
      // A stopped answer stays in the conversation.
      if (answer.text) this._messages.push(message, { role: "assistant", content: answer.text });
    }
  }

  async _race(prompt) {
    const body = this._body({ messages: [{ role: "user", content: prompt }] });
    const answers = { with: this._newAnswer("With speculation"), without: this._newAnswer("Without") };
    byId("race").hidden = false;
    await runRace(answers, body, byId("order").value === "once", this._abort.signal);
  }

  _newAnswer(label) {
    const answer = new Answer({
      label,
      onChange: () => this._onGrown(answer),
      onPick: (piece) => {
        this._stepper.attach(answer);
        this._stepper.showPiece(piece);
      },
    });
    if (label !== "Without") this._stepper.attach(answer);
    return answer;
  }

  /** Redraw at most once per frame. */
  _onGrown(answer) {
    if (this._isStale) return;
    this._isStale = true;
    requestAnimationFrame(() => {
      this._isStale = false;
      this._stepper.refresh();
      if (this.mode !== "race") followStream(answer);
    });
  }

  _body(more) {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    return {
      model: byId("model").value || undefined,
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      speculation: byId("method").value || undefined,
      num_speculative_tokens: number("depth"),
      stream: true,
      return_speculation: true,
      ...more,
    };
  }

  _setRunning(isRunning) {
    byId("stop").hidden = !isRunning;
    byId("told").setAttribute("aria-live", isRunning ? "off" : "polite"); // too fast for screen readers
    byId("send").disabled = isRunning;
    byId("clear").disabled = isRunning;
    for (const radio of document.getElementsByName("mode")) radio.disabled = isRunning;
    if (!isRunning && document.activeElement === document.body) byId("prompt").focus();
  }

  _clear() {
    const mode = this.mode;
    this._messages = [];
    this._stepper.attach(null);
    byId("log").replaceChildren();
    byId("race").hidden = true;
    byId("order-field").hidden = mode !== "race";
    byId("empty").hidden = false;
    this._legend.suggest(true);
    byId("prompt").placeholder = PLACEHOLDERS[mode];
    byId("send").textContent = mode === "race" ? "Race" : "Send";
    byId("clear").textContent = mode === "chat" ? "New conversation" : "Clear";
    byId("examples").replaceChildren(...EXAMPLES[mode].map((text) => this._example(text)));
  }

  _example(text) {
    const button = make("button", { type: "button", class: "example" }, text);
    button.addEventListener("click", () => {
      byId("prompt").value = text;
      byId("ask").requestSubmit();
    });
    return button;
  }
}

/** Scroll with a growing text, unless the user has scrolled back. */
function followStream(answer) {
  const scroll = byId("scroll");
  const left = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
  if (answer.element.classList.contains("is-running") && left < NEAR) scroll.scrollTop += left;
}
