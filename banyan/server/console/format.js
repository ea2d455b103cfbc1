// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export function count(value) {
  return value == null ? "–" : whole.format(Math.round(value));
}

export function rate(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  return value >= 100 ? count(value) : value.toFixed(1);
}

export function share(value) {
  return value == null || !Number.isFinite(value) ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function gib(value) {
  if (value == null) return "–";
  return value < 1 ? `${(1024 * value).toFixed(0)} MiB` : `${value.toFixed(2)} GiB`;
}
