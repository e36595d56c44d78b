// The data, what is chosen, and words for both: what every tab of a dump's page uses.

const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { program: 0, layer: "0", pass: 0, step: null };
function program() { return DATA.programs[state.program]; }

function family(op) { return DATA.families[op] || "other"; }
function colour(op) { return `var(--${family(op)})`; }
function swatch(op) { return el("span", { class: "swatch", style: { background: colour(op) }, "aria-hidden": "true" }); }
function short(op) { return op.replace(/^sidestream\./, ""); }

function micro(value) { return value > 0 && value < 0.01 ? "<0.01 µs" : value >= 1000 ? `${(value / 1000).toFixed(2)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} µs`; }
function flops(value) { return value >= 1e9 ? `${(value / 1e9).toFixed(1)} GFLOP` : `${(value / 1e6).toFixed(1)} MFLOP`; }
function changes(list) { return list.map(([op, count]) => `${count > 0 ? "+" : "−"}${number(Math.abs(count))} ${short(op)}`).join(", "); }
function layerName(key) { return { start: "before the layers", end: "after the layers", all: "all layers" }[key] || `layer ${key}`; }
function layerOrder(key) { return key === "start" ? -1 : key === "end" ? 1e9 : Number(key); }
function layerKeys() {
  const keys = new Set(DATA.graphs.flatMap((graph) => Object.keys(graph)));
  for (const each of DATA.programs) for (const step of each.steps) keys.add(step.layer);
  return [...keys].sort((a, b) => layerOrder(a) - layerOrder(b));
}

// Times of steps: estimated, or measured in one replay.
function placed(of, measured) {
  return measured && of.measured ? of.measured.map(([start, end]) => ({ start, end })) : of.steps.map(({ start, end }) => ({ start, end }));
}
// What a step takes: measured, or estimated as if nothing ran at the same time.
function takes(of, index) { return of.measured ? of.measured[index][1] - of.measured[index][0] : of.steps[index].alone; }

// The share of the floor's speed that a step reaches, and whether that was measured: a CPU's times say nothing about a GPU's floor.
function ofFloor(of, index) {
  const measured = Boolean(of.measured) && DATA.device !== "cpu";
  return { share: of.steps[index].floor / (measured ? takes(of, index) : of.steps[index].alone), measured };
}
const narrow = matchMedia("(max-width: 820px)");
// With one column, the details of the selected step are below the picture.
function bringInto(view) { if (narrow.matches) view.scrollIntoView({ block: "nearest" }); }

// A choice of layer with its two neighbours' buttons; all such choices on the page move together.
function layerChoice(all) {
  const keys = layerKeys();
  const select = el("select", { onchange: () => go(select.value) }, (all ? ["all", ...keys] : keys).map((key) => el("option", { value: key }, layerName(key))));
  const go = (key) => { state.layer = key; changed("layer"); };
  const move = (by) => { const next = keys[keys.indexOf(state.layer) + by]; if (next !== undefined) go(next); };
  const show = () => { select.value = all || state.layer !== "all" ? state.layer : keys[0]; };
  on(["layer"], show);
  show();
  const button = (text, name, by) => el("button", { "aria-label": name, onclick: () => move(by) }, text);
  return el("span", { class: "controls" }, el("label", {}, "Show", select), button("◀", "previous layer", -1), button("▶", "next layer", 1));
}
