// Parses the text format of Prometheus; rates and quantiles between two samples.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/, LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const LABEL_ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

// name -> [[labels, value], ...]
function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(LABEL)) labels[name] = value.replace(/\\[n"\\]/g, (two) => LABEL_ESCAPES[two]);
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push([labels, match[3] === "+Inf" ? Infinity : Number(match[3])]);
  }
  return found;
}

function series(sample, name, wanted = {}) {
  return (sample?.metrics.get(name) || []).filter(([labels]) => Object.entries(wanted).every(([label, value]) => labels[label] === value));
}
// The sum of a metric's series; null if there is none.
function total(sample, name, wanted) {
  const own = series(sample, name, wanted);
  return own.length ? own.reduce((sum, [, value]) => sum + value, 0) : null;
}
// Growth of a counter. One that is smaller than before restarted at zero with its process.
function grown(now, then, name, wanted) {
  const after = total(now, name, wanted);
  if (after === null || !then) return null;
  const before = total(then, name, wanted) ?? 0;
  return after >= before ? after - before : after;
}
function rate(now, then, name, wanted) {
  const count = grown(now, then, name, wanted), seconds = then ? now.time - then.time : 0;
  return count === null || seconds <= 0 ? null : count / seconds;
}
// A quantile of the observations between two samples, as histogram_quantile of Prometheus; null without observations.
function quantile(now, then, name, q) {
  const bounds = [...new Set(series(now, `${name}_bucket`).map(([labels]) => labels.le))];
  const upTo = bounds.map((le) => [le === "+Inf" ? Infinity : Number(le), grown(now, then, `${name}_bucket`, { le }) ?? 0]).sort((a, b) => a[0] - b[0]);
  const all = upTo.at(-1)?.[1];
  if (!all) return null;
  const wanted = q * all, at = upTo.findIndex(([, count]) => count >= wanted);
  const [bound, count] = upTo[at], [low, less] = at ? upTo[at - 1] : [0, 0];
  return bound === Infinity ? low : low + (bound - low) * (wanted - less) / (count - less);
}
