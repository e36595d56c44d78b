// Live state of the gateway and its engines: figures, and charts of the last minutes.

const EVERY = 2000, KEPT = 150, WINDOW = 30; // milliseconds between samples, stored samples, samples of a quantile
const samples = []; // {time, metrics, health, models}, oldest first
const latest = () => samples.at(-1);
const ago = (count) => samples[Math.max(0, samples.length - 1 - count)];
const between = () => (samples.length > 1 ? ago(WINDOW) : undefined);

async function poll() {
  const health = await (await call("/health")).json();
  // a query for the models would start an engine in an idle fleet
  const models = health.status === "idle" ? latest()?.models || [] : (await (await call("/v1/models")).json()).data;
  const text = await metricsText();
  samples.push({ time: performance.now() / 1000, metrics: parseMetrics(text ?? ""), limited: text === null, health, models });
  if (samples.length > KEPT) samples.shift();
}
// Returns null for a user's key, which may not read the figures of all owners.
async function metricsText() {
  try { return await (await call("/metrics")).text(); } catch (problem) {
    if (problem.status === 403) return null;
    throw problem;
  }
}
const deviceOf = (now, engine) => { const on = total(now, `${ENGINE}on_gpu`, engine && { engine }); return on === null ? "device" : on ? "GPU" : "CPU"; };

const ENGINE = "sidestream_engine_", seconds = (value) => (value === null ? "–" : value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toFixed(2)} s`);
const count = (value) => (value === null ? "–" : number(Math.round(value)));
const perSecond = (value) => (value === null ? "–" : value >= 100 ? number(Math.round(value)) : value.toFixed(1));
const tokens = (now, then, wanted) => rate(now, then, `${ENGINE}tokens_total`, wanted);
const hits = (now, then, wanted) => ["hits", "misses"].map((what) => grown(now, then, `${ENGINE}adapter_${what}_total`, wanted));

TABS.live = { title: "Live", build(panel) {
  const figures = el("div", { class: "figures", role: "group", "aria-label": "Figures" }), charts = el("div", { class: "charts" }), note = el("p", { class: "muted" });
  const [engines, adapters, owners, errors, failed] = Array.from({ length: 5 }, () => el("div", { class: "scroll" }));
  const card = (title, box) => el("div", { class: "card" }, el("h2", {}, title), sideways(box));
  const all = [card("Owners", owners), card("Errors by model", errors), card("Last failed requests", failed)];
  panel.append(figures, note, charts, card("Engines", engines), card("Models", adapters), ...all);
  live("live", ["sample", "size"], () => {
    const now = latest();
    if (!now) return;
    for (const box of [figures, charts, ...all]) box.hidden = now.limited;
    engines.replaceChildren(engineTable(now, ago(5)));
    adapters.replaceChildren(modelTable(now, between()));
    if (now.limited) {
      note.textContent = "This key may not read /metrics, which covers all owners: figures, charts, owners and errors are hidden. The operator of the server can make a key with the right to read them.";
      return;
    }
    const seen = Math.round(now.time - between()?.time || 0);
    note.textContent = `Quantiles, shares, evictions and errors are those of the last ${plural(seen, "second")}; updated every two seconds while this page is visible.`;
    figures.replaceChildren(...keyFigures(now, between()));
    const wide = (charts.firstChild || panel).clientWidth - 34;
    const line = (kind, words, value) => [kind, words, samples.map((at, place) => [at.time, place ? value(at, place) : null])];
    const lines = (name) => [["first", "median", 0.5], ["second", "p99", 0.99]].map(([kind, words, q]) => line(kind, words, (at, place) => quantile(at, samples[Math.max(0, place - WINDOW)], name, q)));
    charts.replaceChildren(
      chart("Tokens a second", wide, [line("first", "all engines", (at, place) => tokens(at, samples[Math.max(0, place - 5)]))], perSecond),
      chart("Time to the first token", wide, lines("sidestream_first_token_seconds"), seconds),
      chart("Time between tokens", wide, lines("sidestream_inter_token_seconds"), seconds),
      chart("Time in the queue", wide, lines("sidestream_request_queue_seconds"), seconds),
    );
    owners.replaceChildren(ownerTable(now, between()));
    errors.replaceChildren(errorTable(now, between()));
    failed.replaceChildren(failedTable());
  });
} };

function keyFigures(now, then) {
  const card = (value, text, ...more) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, text), ...more);
  const pages = total(now, `${ENGINE}pages`), used = total(now, `${ENGINE}pages_in_use`), at = (place) => total(now, `${ENGINE}adapters_at`, { place });
  const [found, missed] = hits(now, then), both = (found ?? 0) + (missed ?? 0), failed = httpErrors(now, then);
  const share = (part, whole) => { const all = grown(now, then, ENGINE + whole); return all ? percent(grown(now, then, ENGINE + part) / all) : "–"; };
  const latency = (name, words) => card(seconds(quantile(now, then, name, 0.5)), `${words}, median; p99 ${seconds(quantile(now, then, name, 0.99))}`);
  return [
    card(perSecond(tokens(now, samples.length > 1 ? ago(5) : undefined)), "tokens a second"),
    card(`${count(total(now, `${ENGINE}requests_running`))} · ${count(total(now, `${ENGINE}requests_waiting`))}`, "requests running · waiting"),
    latency("sidestream_first_token_seconds", "to the first token"),
    latency("sidestream_inter_token_seconds", "between tokens"),
    card(pages ? percent((used ?? 0) / pages) : "–", `of ${count(pages)} KV pages in use`, pages ? el("div", {}, bar((used ?? 0) / pages)) : null),
    card(`${count(at("gpu"))} · ${count(at("cpu"))} · ${count(at("disk"))}`, `adapters on ${deviceOf(now)} · host · disk`),
    card(both ? percent(found / both) : "–", `of adapters' requests found it on the ${deviceOf(now)}; ${count(grown(now, then, `${ENGINE}adapter_evictions_total`))} evicted`),
    latency("sidestream_request_queue_seconds", "in the queue"),
    card(share("prefix_hits_total", "prefix_queries_total"), "of prompt tokens from the prefix cache"),
    card(share("accepted_tokens_total", "draft_tokens_total"), "of draft tokens accepted"),
    card(count(failed), "HTTP errors"),
  ];
}

// Lines over time; each is [class, name, [[seconds, value or null], ...]]. Without values there are no labels.
function chart(title, wide, lines, say) {
  const width = Math.max(240, wide), height = 150, left = 64, right = 8, top = 8, bottom = 22, times = lines[0][2].map(([time]) => time);
  const now = times.at(-1) ?? 0, span = Math.max(60, now - (times[0] ?? 0)), values = lines.flatMap(([, , points]) => points.map(([, value]) => value)).filter((value) => value !== null);
  const highest = Math.max(0, ...values), most = (highest || 1) * 1.1, say1 = (points) => say(points.at(-1)?.[1] ?? null);
  const x = (time) => width - right - (now - time) / span * (width - left - right), y = (value) => height - bottom - value / most * (height - top - bottom);
  const last = lines.map(([, name, points]) => `${name} ${say1(points)}`).join(", ");
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${last}` });
  const text = (attributes, words) => picture.append(svg("text", { class: "axis", ...attributes }, words));
  for (const part of [0, 0.5, 1]) {
    picture.append(svg("line", { class: "tick", x1: left, x2: width - right, y1: y(most * part), y2: y(most * part) }));
    if (highest || (values.length && !part)) text({ x: left - 6, y: y(most * part) + 4, "text-anchor": "end" }, say(most * part));
  }
  if (!values.length) text({ x: (left + width) / 2, y: y(most / 2) - 6, "text-anchor": "middle" }, "no data yet");
  text({ x: left, y: height - 6 }, span < 7200 ? `${Math.round(span / 60)} min ago` : `${Math.round(span / 3600)} h ago`);
  text({ x: width - right, y: height - 6, "text-anchor": "end" }, "now");
  for (const [kind, , points] of lines) {
    let path = "", open = false; // a value between two gaps is a dot
    for (const [time, value] of points) { if (value !== null) path += `${open ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}${open ? "" : "h.1"}`; open = value !== null; }
    picture.append(svg("path", { class: `series ${kind}`, d: path }));
  }
  const keys = el("p", { class: "keys" }, lines.map(([kind, name, points]) => el("span", {}, el("i", { class: `key-line ${kind}`, "aria-hidden": "true" }), `${name}: ${say1(points)}`)));
  return el("div", { class: "card" }, el("h2", {}, title), picture, keys);
}
