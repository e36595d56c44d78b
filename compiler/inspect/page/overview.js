// The first answers: how many kernels, which ones a layer runs, what overlaps, what each costs, why a fusion did not happen.

TABS.overview = { title: "Overview", build(panel) {
  const figures = el("div", { class: "figures" }), table = el("div", { class: "scroll" });
  const layer = el("div", { class: "card" }, el("h2", {}, "One layer, kernel by kernel"), el("div", { class: "toolbar" }, layerChoice(false)), table);
  panel.append(figures, layer, refusals(), options());
  live("overview", ["program"], () => figures.replaceChildren(...keyFigures()));
  live("overview", ["program", "layer"], () => table.replaceChildren(layerTable()));
} };

function keyFigures() {
  const first = DATA.passes[0], last = DATA.passes.at(-1), of = program();
  const card = (value, text) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, text));
  const cards = [];
  if (first) cards.push(card(`${number(first.kernels[0])} → ${number(last.kernels[1])}`, `kernels in the graph, before and after ${DATA.passes.length} passes`));
  if (!of) return cards;
  const layerSteps = of.steps.filter((step) => step.layer === "0"), side = layerSteps.filter((step) => step.lane === "side").length;
  if (layerSteps.length) cards.push(card(number(layerSteps.length), `kernels for layer 0: ${layerSteps.length - side} on the main lane, ${side} on the side lane`));
  const measured = of.measured ? placed(of, true).reduce((most, each) => Math.max(most, each.end), 0) : null;
  if (measured) cards.push(card(micro(measured), "one step, measured kernel by kernel"));
  cards.push(card(micro(of.total), `one step, estimated (${plural(of.steps.length, "kernel")})`));
  cards.push(card(percent(of.floor / of.total), `of the floor reached: reading weights, adapters and cache once takes ${micro(of.floor)}`));
  const hidden = hiddenShare(of);
  if (hidden !== null) cards.push(card(percent(hidden), "of the side lane's time passes during main-lane kernels"));
  cards.push(card(bytes(of.arena), `arena for activations; ${bytes(of.unshared)} if no memory were shared`));
  return cards;
}

function overlaps(times, lanes, index) {
  return times.map((time, other) => other).filter((other) => lanes[other] !== lanes[index] && times[other].start < times[index].end - 1e-6 && times[index].start < times[other].end - 1e-6);
}

function hiddenShare(of) {
  const times = placed(of, false), lanes = of.steps.map((step) => step.lane);
  let all = 0, beside = 0;
  times.forEach((time, index) => {
    if (lanes[index] !== "side") return;
    all += time.end - time.start;
    for (const other of overlaps(times, lanes, index)) beside += Math.min(time.end, times[other].end) - Math.max(time.start, times[other].start);
  });
  return all ? beside / all : null;
}

function layerTable() {
  const of = program();
  if (!of) return el("p", { class: "muted" }, "No program was dumped.");
  const times = placed(of, Boolean(of.measured)), lanes = of.steps.map((step) => step.lane);
  const chosen = of.steps.map((step, index) => index).filter((index) => state.layer === "all" || of.steps[index].layer === state.layer);
  const head = ["#", "kernel", "lane", of.measured ? "measured" : "estimated", "runs beside", "floor", "of the floor", "moves", "bound by"];
  const numeric = [3, 5, 6, 7];
  const rows = chosen.map((index) => {
    const step = of.steps[index], took = takes(of, index);
    const beside = overlaps(times, lanes, index).map((other) => short(of.steps[other].op));
    return [String(index), el("span", { class: "nowrap" }, swatch(step.op), stepLink(index)), el("span", { class: `badge ${step.lane}` }, step.sms ? `${step.lane}, ${step.sms} SMs` : step.lane),
      micro(took), beside.length ? [...new Set(beside)].join(", ") : "–", micro(step.floor), el("span", {}, percent(step.floor / took), bar(step.floor / took)), bytes(step.bytes), step.bound];
  });
  const sum = chosen.reduce((total, index) => total + takes(of, index), 0);
  const span = Math.max(...chosen.map((index) => times[index].end)) - Math.min(...chosen.map((index) => times[index].start));
  const cells = (tag, row) => el("tr", {}, row.map((cell, place) => el(tag, { class: numeric.includes(place) ? "number" : null }, cell)));
  const note = chosen.length ? `${plural(chosen.length, "kernel")} of ${layerName(state.layer)}: ${micro(sum)} one after the other, ${micro(span)} on the two lanes.` : "This program has no kernel here.";
  return el("div", {}, el("table", {}, el("thead", {}, cells("th", head)), el("tbody", {}, rows.map((row) => cells("td", row)))), el("p", { class: "muted" }, note), el("p", { class: "muted" }, `Estimates are for an H200; their error is ${DATA.error}.`));
}

function stepLink(index) {
  return el("button", { class: "link mono", onclick: () => { state.step = index; openTab("schedule"); changed("step"); } }, short(program().steps[index].op));
}

// Reasons that differ in numbers only are one reason.
function grouped(reasons) {
  const groups = new Map();
  for (const reason of reasons) {
    const key = reason.replace(/\d+/g, "#");
    groups.set(key, [...(groups.get(key) || []), reason]);
  }
  return [...groups.values()];
}

function reasonList(reasons) {
  const list = (items) => el("ul", { class: "plain" }, items);
  const others = (group) => el("details", {}, el("summary", { class: "muted" }, `and ${group.length - 1} more like it`), list(group.slice(1).map((reason) => el("li", {}, reason))));
  return list(grouped(reasons).map((group) => el("li", {}, group[0], group.length > 1 ? others(group) : null)));
}

function refusals() {
  const card = el("div", { class: "card" }, el("h2", {}, "Why a fusion did not happen"));
  const refused = DATA.passes.filter((pass) => pass.rejected.length), off = DATA.options.disable || [];
  for (const pass of refused) {
    const open = () => { state.pass = DATA.passes.indexOf(pass); openTab("passes"); changed("pass"); };
    card.append(el("h3", {}, el("button", { class: "link", onclick: open }, pass.name)), reasonList(pass.rejected));
  }
  if (!refused.length) card.append(el("p", {}, "No pass refused anything that looked like its pattern."));
  const idle = DATA.passes.filter((pass) => !pass.matches && !pass.rejected.length).map((pass) => pass.name);
  if (idle.length) card.append(el("p", { class: "muted" }, `Nothing in this model looked like what these passes look for: ${idle.join(", ")}.`));
  if (off.length) card.append(el("p", { class: "warn" }, `Switched off by option: ${off.join(", ")}.`));
  return card;
}

function options() {
  const entries = Object.entries(DATA.options);
  if (!entries.length) return "";
  return el("details", { class: "card" }, el("summary", {}, "Options of this compilation"), el("dl", {}, entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: "mono" }, JSON.stringify(value))])));
}
