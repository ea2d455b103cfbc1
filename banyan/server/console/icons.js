// Icons: strokes in a square of 24, in the colour of the text around them.

import { svg } from "./dom.js";

const PATHS = {
  chat: "M4 5h16v11H9l-5 4z",
  requests: "M4 6h16M4 12h16M4 18h10",
  engine: "M4 19V9M10 19V5M16 19v-7M21 19H3",
  tokens: "M4 7h6v10H4zM14 7h6v10h-6z",
  models: "M12 3l8 4.500v9L12 21l-8-4.500v-9zM4 7.500l8 4.500 8-4.500M12 12v9",
  settings: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4v6M8 14v6",
  api: "M9 6l-6 6 6 6M15 6l6 6-6 6",
  menu: "M4 6h16M4 12h16M4 18h16",
  add: "M12 5v14M5 12h14",
  send: "M12 20V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L20 8l-4-4L4 16z",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  next: "M9 5l7 7-7 7",
  before: "M15 5l-7 7 7 7",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11M7 11l5 5 5-5M4 20h16",
  upload: "M12 16V5M7 9l5-5 5 5M4 20h16",
  list: "M8 6h12M8 12h12M8 18h12M4 6h.01M4 12h.01M4 18h.01",
  continue: "M5 5v14l9-7zM19 5v14",
};

export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" },
    svg("path", { d: PATHS[name] }));
}
