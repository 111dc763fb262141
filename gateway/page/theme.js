// Light, dark, or as the system has it; remembered for the next visit.

import { byId } from "./dom.js";

const THEMES = {
  auto: { next: "light", shown: "◐ Auto", told: "as the system has them" },
  light: { next: "dark", shown: "○ Light", told: "light" },
  dark: { next: "auto", shown: "● Dark", told: "dark" },
};
const KEPT = "outrider.theme";

export function setUpTheme() {
  const kept = localStorage.getItem(KEPT);
  apply(kept in THEMES ? kept : "auto");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[document.documentElement.dataset.theme].next;
    localStorage.setItem(KEPT, next);
    apply(next);
  });
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme].shown;
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[theme].told}`);
}
