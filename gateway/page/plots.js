// Small SVG plots of the last 90 seconds, with one or two lines each.

import { draw, make } from "./dom.js";

const POINTS = 90;
const WIDTH = POINTS - 1;
const HEIGHT = 30;

/** `lines` are names of values; `shown` formats the newest; `least` is the minimum top of the
 * scale, so that noise does not fill the plot. */
export class Plot {
  constructor(title, { lines, shown, least, top = null }) {
    this._lines = lines.map(() => []);
    this._names = lines;
    this._shown = shown;
    this._least = least;
    this._top = top;
    this._title = title;
    this._figure = make("span", { class: "figure" }, "–");
    this._picture = draw("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": title,
    });
    this.element = make(
      "figure",
      { class: "plot" },
      make("figcaption", {}, make("span", { class: "plot-title" }, title), this._figure),
      this._picture,
    );
  }

  /** The newest value of each line; null is a gap. */
  push(...values) {
    this._lines.forEach((line, at) => {
      line.push(values[at] ?? null);
      if (line.length > POINTS) line.shift();
    });
    const text = this._shown(...values);
    this._figure.textContent = text;
    this._picture.setAttribute("aria-label", `${this._title}: ${text}`);
    this._draw();
  }

  _draw() {
    const known = this._lines.flat().filter((value) => value !== null);
    const top = this._top ?? Math.max(this._least, ...known) * 1.1;
    const parts = this._lines.flatMap((line, at) => {
      const runs = runsOf(line, top);
      const paths = runs.map((run) => draw("path", { d: `M${run.join("L")}`, class: `line line-${at}` }));
      if (at > 0) return paths;
      const areas = runs.map((run) => {
        const [first, last] = [run[0], run.at(-1)].map((point) => point.split(",")[0]);
        return draw("path", { d: `M${first},${HEIGHT}L${run.join("L")}L${last},${HEIGHT}Z`, class: "area" });
      });
      return [...areas, ...paths];
    });
    this._picture.replaceChildren(...parts);
  }
}

/** The points of a line as "x,y", split at missing values. The newest is at the right edge. */
function runsOf(line, top) {
  const runs = [[]];
  line.forEach((value, at) => {
    if (value === null) {
      if (runs.at(-1).length) runs.push([]);
      return;
    }
    const x = WIDTH - (line.length - 1 - at);
    const y = HEIGHT - 1 - (Math.min(value, top) / top) * (HEIGHT - 3);
    runs.at(-1).push(`${x},${y.toFixed(2)}`);
  });
  return runs.filter((run) => run.length > 0);
}
