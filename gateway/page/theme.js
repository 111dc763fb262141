// Light, dark, or the system's theme; stored for the next visit.

import { byId } from "./dom.js";

const THEMES = {
  auto: { next: "light", shown: "◐ Auto", label: "as the system has them" },
  light: { next: "dark", shown: "○ Light", label: "light" },
  dark: { next: "auto", shown: "● Dark", label: "dark" },
};
const STORAGE_KEY = "outrider.theme";

export function setUpTheme() {
  const kept = localStorage.getItem(STORAGE_KEY);
  apply(kept in THEMES ? kept : "auto");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[document.documentElement.dataset.theme].next;
    localStorage.setItem(STORAGE_KEY, next);
    apply(next);
  });
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme].shown;
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[theme].label}`);
}
