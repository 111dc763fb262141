// The error banner: the server's message, and its remedy.

import { storeKey } from "./api.js";
import { byId } from "./dom.js";

let onRetry = () => {};
let isOfConnection = false;

/** `retry` is called by the button, and after a key was entered. */
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

/** Show an error; for a missing or invalid key, with a field to enter one. */
export function showError(error) {
  show(error.message, { asksKey: error.status === 401 });
  isOfConnection = false;
}

/** The server does not respond; `seconds` until the next poll. */
export function showLost(error, seconds) {
  const asksKey = error.status === 401;
  // Keep a banner in which the user may be typing a key, or reading another error.
  if (!byId("banner").hidden && !isOfConnection) return;
  if (asksKey && isOfConnection) return;
  show(asksKey ? error.message : `${error.message} Trying again in ${seconds} s.`, {
    asksKey,
    retries: !asksKey,
  });
  isOfConnection = true;
}

/** The server responds again. */
export function showFound() {
  if (isOfConnection) hideBanner();
}

function show(text, { asksKey = false, retries = false }) {
  // Capitalize plain words only, not names of fields.
  byId("banner-text").textContent = text.replace(/^[a-z]+(?=[ ,])/, (word) => word.charAt(0).toUpperCase() + word.slice(1));
  byId("key-form").hidden = !asksKey;
  byId("retry").hidden = !retries;
  byId("banner").hidden = false;
}
