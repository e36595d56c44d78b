// Tables of engines, models, owners, errors and failed requests.

// Columns are [title, cells' text or nodes, whether they are numbers].
function tableOf(columns, rows, none) {
  if (!rows.length) return el("p", { class: "muted" }, none);
  const cells = (tag, values) => el("tr", {}, values.map((value, place) => el(tag, { class: columns[place][2] ? "number" : null, ...(tag === "th" ? { scope: "col" } : {}) }, value)));
  return el("table", {}, el("thead", {}, cells("th", columns.map(([title]) => title))), el("tbody", {}, rows.map((row) => cells("td", columns.map(([, value]) => value(row))))));
}

function engineTable(now, then) {
  const gauge = (name, engine) => total(now, ENGINE + name, { engine });
  const columns = [["engine", (each) => each], ["state", (each) => el("span", { class: "badge" }, now.health.engines[each])], ["tokens/s", (engine) => perSecond(tokens(now, then, { engine })), true],
    ["running", (each) => count(gauge("requests_running", each)), true], ["waiting", (each) => count(gauge("requests_waiting", each)), true],
    ["KV pages", (each) => (gauge("pages", each) === null ? "–" : `${count(gauge("pages_in_use", each))} of ${count(gauge("pages", each))}`), true], ["adapters in slots", (each) => count(gauge("adapters_resident", each)), true],
    ["hits", (each) => count(gauge("adapter_hits_total", each)), true], ["loads", (each) => count(gauge("adapter_misses_total", each)), true], ["evictions", (each) => count(gauge("adapter_evictions_total", each)), true],
    ["preemptions", (each) => count(gauge("preemptions_total", each)), true]];
  return tableOf(now.limited ? columns.slice(0, 2) : columns, Object.keys(now.health.engines), "No engine is connected.");
}

function modelTable(now, then) {
  const words = (engine, where) => ({ gpu: deviceOf(now, engine), cpu: "host" })[where] || where;
  const place = (card) => Object.entries(card.places || {}).flatMap(([engine, where]) => [el("span", { class: "badge" }, `${engine}: ${words(engine, where)}`), " "]);
  const own = (name) => (card) => count(total(now, name, { model: card.id }) ?? 0);
  const base = now.models.filter((card) => !card.parent), adapters = now.models.filter((card) => card.parent);
  const columns = [["model", (card) => el("span", { class: "mono" }, card.id)], ["rank", (card) => String(card.rank ?? "base"), true], ["where", place],
    ["requests", own("sidestream_requests_total"), true], ["output tokens", own("sidestream_output_tokens_total"), true],
    ["output tokens/s", (card) => perSecond(rate(now, then, "sidestream_output_tokens_total", { model: card.id }) ?? 0), true]];
  return tableOf(now.limited ? columns.slice(0, 3) : columns, [...base, ...adapters], "No model is known yet.");
}

function ownerTable(now, then) {
  const names = [...new Set(["owner_tokens", "owner_refused"].flatMap((name) => series(now, `sidestream_${name}_total`).map(([labels]) => labels.owner)))].sort();
  const own = (name) => (owner) => count(total(now, `sidestream_${name}_total`, { owner }) ?? 0);
  return tableOf([["owner", (owner) => owner || "without a key"], ["requests", own("owner_requests"), true], ["tokens", own("owner_tokens"), true],
    ["tokens/s", (owner) => perSecond(rate(now, then, "sidestream_owner_tokens_total", { owner }) ?? 0), true], ["refused (429)", own("owner_refused"), true]], names, "No request has ended yet.");
}

const isError = ([labels]) => Number(labels.status) >= 400;
function httpErrors(now, then) {
  return series(now, "sidestream_http_requests_total").filter(isError).reduce((sum, [labels]) => sum + (grown(now, then, "sidestream_http_requests_total", labels) ?? 0), 0);
}
const STATUS = { 400: "wrong request", 401: "no valid key", 403: "not allowed", 404: "not found", 405: "wrong method", 408: "too slow", 413: "too large", 429: "over a limit", 499: "client disconnected", 500: "fault of the gateway", 502: "fault of an engine", 503: "no engine, or overloaded", 504: "too late" };
// Errors of admitted requests by model, and of refused POST requests by path: these have no model yet.
function errorTable(now, then) {
  const rows = ["sidestream_requests_total", "sidestream_http_requests_total"].flatMap((name) => series(now, name).filter(isError).map(([labels, all]) =>
    ({ ...labels, all, recent: grown(now, then, name, labels) ?? 0 })));
  const admitted = new Set(rows.filter((row) => row.model).map((row) => `${row.endpoint} ${row.status}`));
  const shown = rows.filter((row) => row.model || row.method === "POST" && !admitted.has(`${row.route} ${row.status}`)).sort((a, b) => b.recent - a.recent || b.all - a.all);
  return tableOf([["model", (row) => row.model || "–"], ["code", (row) => `${row.status} ${row.error || STATUS[row.status] || ""}`], ["endpoint", (row) => el("span", { class: "mono" }, row.endpoint || `${row.method} ${row.route}`)],
    ["lately", (row) => count(row.recent), true], ["since the start", (row) => count(row.all), true]], shown, "None since the gateway started.");
}

function failedTable() {
  return tableOf([["time", (row) => new Date(row.time * 1000).toLocaleTimeString()], ["code", (row) => `${row.status} ${row.error || STATUS[row.status] || ""}`], ["model", (row) => row.model || "–"], ["owner", (row) => row.owner || "–"],
    ["endpoint", (row) => el("span", { class: "mono" }, row.endpoint || "–")], ["request id", (row) => el("span", { class: "mono" }, row.request_id)]], day.failed.slice(0, 20), "None since the gateway started.");
}
