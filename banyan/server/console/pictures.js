// Pictures of a question: picked, pasted or dropped, made smaller if they are large, and shown.

import { ask } from "./api.js";
import { button, h } from "./dom.js";
import { icon } from "./icons.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 8;
const MAX_BYTES = 1_500_000;  // of a file that is sent as it is
const MAX_SIDE = 2048;  // pixels

export const PICTURE_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]*$/;

/** The pictures of the next message. `fail` gets what went wrong, in words. */
export class PictureInput {
  constructor(fail) {
    this.fail = fail;
    this.pictures = [];
    this.row = h("ul", { class: "pictures", "aria-label": "Pictures of this message", hidden: true });
    this.picker = h("input", { type: "file", accept: KINDS.join(","), multiple: true, hidden: true,
      onchange: () => { this.add([...this.picker.files]); this.picker.value = ""; } });
    this.press = h("button", { type: "button", class: "quiet", "aria-label": "Add pictures",
      title: "Add pictures", onclick: () => this.picker.click() }, icon("picture"));
  }

  /** Take what is pasted or dropped on an element, if it has pictures. */
  listen(element) {
    element.addEventListener("paste", (event) => this.takeFrom(event, event.clipboardData));
    element.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    element.addEventListener("drop", (event) => this.takeFrom(event, event.dataTransfer));
  }

  takeFrom(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.add([...files]);
  }

  async add(files) {
    try {
      await checkSight();
      for (const file of files) {
        if (this.pictures.length >= MOST) throw new Error(`A message takes ${MOST} pictures.`);
        this.pictures.push(await pictureOf(file));
      }
    } catch (error) {
      this.fail(error.message);
    }
    this.draw();
  }

  /** The pictures, which are then no longer in the input. */
  take() {
    const taken = this.pictures;
    this.pictures = [];
    this.draw();
    return taken;
  }

  draw() {
    this.row.hidden = !this.pictures.length;
    this.row.replaceChildren(...this.pictures.map((picture, at) => h("li", {}, pictureView(picture),
      button("×", () => { this.pictures.splice(at, 1); this.draw(); },
        { class: "quiet", label: `Remove ${picture.name}` }))));
  }
}

export function pictureView({ name, url }) {
  return h("img", { src: PICTURE_URL.test(url) ? url : null, alt: name });
}

/** An error if the model cannot see; its text says what to do. */
async function checkSight() {
  const { has_image_understanding: sees, served_model_name: name } = await ask("model_info");
  if (!sees) {
    throw new Error(`${name} reads text only. To ask about pictures, serve a model that sees, for `
      + "example Qwen/Qwen2.5-VL-3B-Instruct.");
  }
}

async function pictureOf(file) {
  if (!KINDS.includes(file.type)) {
    throw new Error(`${file.name} is no picture of a known kind: PNG, JPEG, WebP or GIF.`);
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read as a picture.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const isSmall = scale === 1 && file.size <= MAX_BYTES;
  const url = await urlOf(isSmall ? file : await smaller(bitmap, scale));
  bitmap.close();
  return { name: file.name || "pasted picture", url };
}

async function smaller(bitmap, scale) {
  const canvas = new OffscreenCanvas(Math.round(bitmap.width * scale), Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 });
}

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
