// What went wrong, in one calm place: the server's sentence, and what can be done about it.

import { storeKey } from "./api.js";
import { byId } from "./dom.js";

let onRetry = () => {};
let isOfConnection = false;

/** `retry` is called when the reader asks for it, and after a key was given. */
export function setUpBanner(retry) {
  onRetry = retry;
  byId("dismiss").addEventListener("click", hideBanner);
  byId("retry").addEventListener("click", () => onRetry());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    byId("key").value = "";
    if (!/^[\x21-\x7e]*$/.test(key)) {
      show("The key has characters that no header can carry; copy it again.", { asksKey: true });
      return;
    }
    storeKey(key);
    hideBanner();
    onRetry();
  });
}

export function hideBanner() {
  byId("banner").hidden = true;
  isOfConnection = false;
}

/** Show an error; for a missing or unknown key, with a field for another. */
export function showError(error) {
  show(error.message, { asksKey: error.status === 401 });
  isOfConnection = false;
}

/** The server does not tell how it is; `seconds` until it is asked again. */
export function showLost(error, seconds) {
  const asksKey = error.status === 401;
  // Somebody may be typing a key, and another error may still be read.
  if (!byId("banner").hidden && !isOfConnection) return;
  if (asksKey && isOfConnection) return;
  show(asksKey ? error.message : `${error.message} Trying again in ${seconds} s.`, {
    asksKey,
    retries: !asksKey,
  });
  isOfConnection = true;
}

/** The server tells again how it is. */
export function showFound() {
  if (isOfConnection) hideBanner();
}

function show(text, { asksKey = false, retries = false }) {
  // Names of fields stay as they are written.
  byId("banner-text").textContent = text.replace(/^[a-z]+(?=[ ,])/, (word) => word.charAt(0).toUpperCase() + word.slice(1));
  byId("key-form").hidden = !asksKey;
  byId("retry").hidden = !retries;
  byId("banner").hidden = false;
}
