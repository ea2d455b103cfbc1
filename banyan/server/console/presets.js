// Presets: names for a system prompt with sampling parameters, kept in this browser.

const NAME = "banyan.presets";
const FIELDS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed", "stop"];

const BUILT_IN = {
  "Defaults": {},
  "Precise": { temperature: "0.2", top_p: "0.9" },
  "Creative": { temperature: "1.1", top_p: "0.95" },
  "Programmer": { system: "You are an experienced programmer. Answer with working code and few words.",
    temperature: "0.2" },
};

/** Preset name -> settings. */
export function presets() {
  return { ...BUILT_IN, ...own() };
}

/** The settings of a conversation that a preset sets; what it leaves out is "". */
export function settingsOf(name) {
  const chosen = presets()[name] ?? {};
  return Object.fromEntries(FIELDS.map((field) => [field, chosen[field] ?? ""]));
}

/** The name of the preset that settings equal; "" = none. */
export function presetOf(settings) {
  const isSame = (name) => Object.entries(settingsOf(name)).every(([field, value]) =>
    (settings[field] ?? "") === value);
  return Object.keys(presets()).find(isSame) ?? "";
}

export function savePreset(name, settings) {
  const kept = Object.fromEntries(FIELDS.filter((field) => settings[field]).map(
    (field) => [field, settings[field]]));
  localStorage.setItem(NAME, JSON.stringify({ ...own(), [name]: kept }));
}

export function isOwn(name) {
  return name in own();
}

export function removePreset(name) {
  const left = own();
  delete left[name];
  localStorage.setItem(NAME, JSON.stringify(left));
}

function own() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {};
  }
}
