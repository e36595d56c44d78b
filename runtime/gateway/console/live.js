// Live state of the gateway and its engines: figures, charts of the last minutes, tables of engines, adapters and errors.

const EVERY = 2000, KEPT = 150, WINDOW = 30; // milliseconds between samples, stored samples, samples of a quantile
const samples = []; // {time, metrics, health, models}, oldest first
const latest = () => samples.at(-1);
const ago = (count) => samples[Math.max(0, samples.length - 1 - count)];
const between = () => (samples.length > 1 ? ago(WINDOW) : undefined);

async function poll() {
  const [metrics, health] = await Promise.all([call("/metrics"), call("/health").then((answer) => answer.json())]);
  // a query for the models would start an engine in an idle fleet
  const models = health.status === "idle" ? latest()?.models || [] : (await (await call("/v1/models")).json()).data;
  samples.push({ time: performance.now() / 1000, metrics: parseMetrics(await metrics.text()), health, models });
  if (samples.length > KEPT) samples.shift();
}

const ENGINE = "sidestream_engine_", seconds = (value) => (value === null ? "–" : value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toFixed(2)} s`);
const count = (value) => (value === null ? "–" : number(Math.round(value)));
const perSecond = (value) => (value === null ? "–" : value >= 100 ? number(Math.round(value)) : value.toFixed(1));
const tokens = (now, then, wanted) => rate(now, then, `${ENGINE}tokens_total`, wanted);
const hits = (now, then, wanted) => ["hits", "misses"].map((what) => grown(now, then, `${ENGINE}adapter_${what}_total`, wanted));

TABS.live = { title: "Live", build(panel) {
  const figures = el("div", { class: "figures", role: "group", "aria-label": "Figures" }), charts = el("div", { class: "charts" }), note = el("p", { class: "muted" });
  const engines = el("div", { class: "scroll" }), adapters = el("div", { class: "scroll" }), errors = el("div", { class: "scroll" });
  const card = (title, box) => el("div", { class: "card" }, el("h2", {}, title), sideways(box));
  panel.append(figures, note, charts, card("Engines", engines), card("Adapters", adapters), card("Errors", errors));
  live("live", ["sample", "size"], () => {
    const now = latest();
    if (!now) return;
    const seen = Math.round(now.time - between()?.time || 0);
    note.textContent = `Quantiles, shares, evictions and errors are those of the last ${plural(seen, "second")}; updated every two seconds while this page is visible.`;
    figures.replaceChildren(...keyFigures(now, between()));
    const wide = (charts.firstChild || panel).clientWidth - 34;
    const lines = (name) => [["first", "median", 0.5], ["second", "p99", 0.99]].map(([kind, words, q]) => [kind, words, (at, place) => quantile(at, samples[Math.max(0, place - WINDOW)], name, q)]);
    charts.replaceChildren(
      chart("Tokens a second", wide, [["first", "all engines", (at, place) => tokens(at, samples[Math.max(0, place - 5)])]], perSecond),
      chart("Time to the first token", wide, lines("sidestream_first_token_seconds"), seconds),
      chart("Time between tokens", wide, lines("sidestream_inter_token_seconds"), seconds),
    );
    engines.replaceChildren(engineTable(now, ago(5)));
    adapters.replaceChildren(adapterTable(now, between()));
    errors.replaceChildren(errorTable(now, between()));
  });
} };

function keyFigures(now, then) {
  const card = (value, text, ...more) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, text), ...more);
  const pages = total(now, `${ENGINE}pages`), used = total(now, `${ENGINE}pages_in_use`), at = (place) => total(now, `${ENGINE}adapters_at`, { place });
  const [found, missed] = hits(now, then), both = (found ?? 0) + (missed ?? 0), failed = errorRows(now, then).reduce((sum, row) => sum + row.recent, 0);
  const latency = (name, words) => card(seconds(quantile(now, then, name, 0.5)), `${words}, median; p99 ${seconds(quantile(now, then, name, 0.99))}`);
  return [
    card(perSecond(tokens(now, samples.length > 1 ? ago(5) : undefined)), "tokens a second"),
    card(`${count(total(now, `${ENGINE}requests_running`))} · ${count(total(now, `${ENGINE}requests_waiting`))}`, "requests running · waiting"),
    latency("sidestream_first_token_seconds", "to the first token"),
    latency("sidestream_inter_token_seconds", "between tokens"),
    card(pages ? percent((used ?? 0) / pages) : "–", `of ${count(pages)} KV pages in use`, pages ? el("div", {}, bar((used ?? 0) / pages)) : null),
    card(`${count(at("gpu"))} · ${count(at("cpu"))} · ${count(at("disk"))}`, "adapters on GPU · host · disk"),
    card(both ? percent(found / both) : "–", `of adapters' requests found it on the GPU; ${count(grown(now, then, `${ENGINE}adapter_evictions_total`))} evicted`),
    card(count(failed), "HTTP errors"),
  ];
}

// Lines over the stored time; each series is [class, name, value(sample, index)].
function chart(title, wide, all, say) {
  const width = Math.max(240, wide), height = 150, left = 64, right = 8, top = 8, bottom = 22, span = Math.max(60, latest().time - samples[0].time);
  const lines = all.map(([kind, name, value]) => [kind, name, samples.map((at, index) => [at.time, index ? value(at, index) : null])]);
  const most = Math.max(1e-6, ...lines.flatMap(([, , points]) => points.map(([, value]) => value ?? 0))) * 1.1;
  const x = (time) => width - right - (latest().time - time) / span * (width - left - right), y = (value) => height - bottom - value / most * (height - top - bottom);
  const last = lines.map(([, name, points]) => `${name} ${say(points.at(-1)[1])}`).join(", ");
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${last}` });
  for (const part of [0, 0.5, 1]) picture.append(
    svg("line", { class: "tick", x1: left, x2: width - right, y1: y(most * part), y2: y(most * part) }),
    svg("text", { class: "axis", x: left - 6, y: y(most * part) + 4, "text-anchor": "end" }, say(most * part)),
  );
  picture.append(svg("text", { class: "axis", x: left, y: height - 6 }, `${Math.round(span / 60) || 1} min ago`), svg("text", { class: "axis", x: width - right, y: height - 6, "text-anchor": "end" }, "now"));
  for (const [kind, , points] of lines) {
    let path = "", open = false;
    for (const [time, value] of points) { if (value !== null) path += `${open ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`; open = value !== null; }
    picture.append(svg("path", { class: `series ${kind}`, d: path }));
  }
  const keys = el("p", { class: "keys" }, lines.map(([kind, name, points]) => el("span", {}, el("i", { class: `key-line ${kind}`, "aria-hidden": "true" }), `${name}: ${say(points.at(-1)[1])}`)));
  return el("div", { class: "card" }, el("h2", {}, title), picture, keys);
}

// Columns are [title, cells' text or nodes, whether they are numbers].
function tableOf(columns, rows, none) {
  if (!rows.length) return el("p", { class: "muted" }, none);
  const cells = (tag, values) => el("tr", {}, values.map((value, place) => el(tag, { class: columns[place][2] ? "number" : null, ...(tag === "th" ? { scope: "col" } : {}) }, value)));
  return el("table", {}, el("thead", {}, cells("th", columns.map(([title]) => title))), el("tbody", {}, rows.map((row) => cells("td", columns.map(([, value]) => value(row))))));
}

function engineTable(now, then) {
  const gauge = (name, engine) => total(now, ENGINE + name, { engine });
  return tableOf([["engine", (each) => each], ["state", (each) => el("span", { class: "badge" }, now.health.engines[each])], ["tokens/s", (engine) => perSecond(tokens(now, then, { engine })), true],
    ["running", (each) => count(gauge("requests_running", each)), true], ["waiting", (each) => count(gauge("requests_waiting", each)), true],
    ["KV pages", (each) => (gauge("pages", each) === null ? "–" : `${count(gauge("pages_in_use", each))} of ${count(gauge("pages", each))}`), true], ["adapters on GPU", (each) => count(gauge("adapters_resident", each)), true],
    ["hits", (each) => count(gauge("adapter_hits_total", each)), true], ["loads", (each) => count(gauge("adapter_misses_total", each)), true], ["evictions", (each) => count(gauge("adapter_evictions_total", each)), true],
    ["preemptions", (each) => count(gauge("preemptions_total", each)), true]], Object.keys(now.health.engines), "No engine is connected.");
}

function adapterTable(now, then) {
  const place = (card) => Object.entries(card.places || {}).flatMap(([engine, where]) => [el("span", { class: "badge" }, `${engine}: ${{ gpu: "GPU", cpu: "host" }[where] || where}`), " "]);
  const own = (name) => (card) => total(now, name, { model: card.id });
  return tableOf([["adapter", (card) => el("span", { class: "mono" }, card.id)], ["rank", (card) => String(card.rank ?? "–"), true], ["where", place],
    ["requests", (card) => count(own("sidestream_requests_total")(card) ?? 0), true], ["output tokens", (card) => count(own("sidestream_output_tokens_total")(card) ?? 0), true],
    ["output tokens/s", (card) => perSecond(rate(now, then, "sidestream_output_tokens_total", { model: card.id }) ?? 0), true]], now.models.filter((card) => card.parent), "No adapter is loaded.");
}

function errorRows(now, then) {
  const rows = series(now, "sidestream_http_requests_total").filter(([labels]) => Number(labels.status) >= 400);
  return rows.map(([labels, all]) => ({ ...labels, all, recent: grown(now, then, "sidestream_http_requests_total", labels) ?? 0 })).sort((a, b) => b.recent - a.recent || b.all - a.all);
}
const STATUS = { 400: "wrong request", 401: "no valid key", 403: "not allowed", 404: "not found", 405: "wrong method", 408: "too slow", 413: "too large", 429: "over a limit", 499: "client disconnected", 500: "fault of the gateway", 502: "fault of an engine", 503: "no engine, or overloaded", 504: "too late" };
function errorTable(now, then) {
  return tableOf([["code", (row) => `${row.status} ${STATUS[row.status] || ""}`], ["endpoint", (row) => el("span", { class: "mono" }, `${row.method} ${row.route}`)], ["lately", (row) => count(row.recent), true], ["since the start", (row) => count(row.all), true]],
    errorRows(now, then), now.metrics.has("sidestream_http_requests_total") ? "None since the gateway started." : "This gateway counts no requests.");
}
