// A small plot of what was, up to now: one or two lines in the same picture, and the newest figure.

import { h, svg } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 84;

export class Plot {
  /** `names` are those of its lines; `words` makes a figure readable. */
  constructor(title, names, words) {
    this.names = names;
    this.words = words;
    this.title = title;
    this.now = h("p", { class: "figure" }, "–");
    this.most = h("span", {}, "");
    this.lines = names.map((_, i) => svg("polyline", { class: `line line${i}` }));
    this.areas = names.map((_, i) => svg("polygon", { class: `area area${i}` }));
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    }, this.areas, this.lines);
    this.element = h("article", { class: "plot" },
      h("h2", {}, title), this.now, this.picture,
      h("p", { class: "scale" }, this.most, this.legend()));
  }

  legend() {
    if (this.names.length < 2) return null;
    return h("span", {}, this.names.map((name, i) => h("span", { class: `key key${i}` }, name)));
  }

  /**
   * `points` are lists of figures, one for each line, the newest last; null where there was none.
   * `room` is how many points the width has, `top` the figure at the upper edge, if it is fixed.
   */
  show(points, room, top) {
    const seen = points.flat().filter((value) => Number.isFinite(value));
    const most = top ?? Math.max(1e-9, ...seen) * 1.1;
    const x = (i) => WIDTH * (1 - (points.length - 1 - i) / (room - 1));
    const y = (value) => HEIGHT - 2 - (HEIGHT - 6) * Math.min(1, value / most);
    this.names.forEach((name, line) => {
      const places = points.flatMap((values, i) => Number.isFinite(values[line])
        ? [`${x(i).toFixed(1)},${y(values[line]).toFixed(1)}`] : []);
      this.lines[line].setAttribute("points", places.join(" "));
      const ends = places.length ? [places[0], places.at(-1)].map((place) => place.split(",")[0]) : [];
      this.areas[line].setAttribute("points",
        places.length ? `${ends[0]},${HEIGHT} ${places.join(" ")} ${ends[1]},${HEIGHT}` : "");
    });
    const words = (points.at(-1) ?? []).map((value) => this.words(value));
    this.now.textContent = words.join(" / ") || "–";
    this.most.textContent = seen.length ? `up to ${this.words(top ?? Math.max(...seen))}` : "";
    this.picture.setAttribute("aria-label", `${this.title}: now ${words.join(" and ")}`);
  }
}
