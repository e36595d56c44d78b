// The first answers: how many kernels, which ones a layer runs, what overlaps, what each costs, why a fusion did not happen.

TABS.overview = { title: "Overview", build(panel) {
  const about = el("p", { class: "muted" }), figures = el("div", { class: "figures" }), far = el("p", { class: "muted" }), table = el("div", { class: "scroll" });
  const layer = el("div", { class: "card" }, el("h2", {}, "One layer, kernel by kernel"), el("div", { class: "toolbar" }, layerChoice(false)), sideways(table));
  panel.append(about, figures, far, layer, refusals(), options());
  live("overview", ["program"], () => {
    about.textContent = aboutProgram();
    figures.replaceChildren(...keyFigures());
    far.textContent = whyFar(program());
  });
  live("overview", ["program", "layer"], () => table.replaceChildren(layerTable()));
} };

function aboutProgram() {
  const { tokens, sequences, blocks, decode, lora } = program()?.bucket || {};
  if (!tokens) return "";
  const what = decode ? `one decode step of ${plural(sequences, "sequence")}` : `one step of ${plural(tokens, "token")}, prefill and decode mixed, of at most ${plural(sequences, "sequence")}`;
  return `${program().name}: ${what}, with at most ${plural(blocks, "page")} of KV cache each, ${lora ? "with" : "without"} adapters.`;
}

// How this program's kernels differ from the graph's: [[op, count], ...].
function againstGraph(of) {
  const counts = new Map(Object.entries(DATA.graph_ops).map(([op, count]) => [op, -count]));
  for (const { op } of of.steps) counts.set(op, (counts.get(op) || 0) + 1);
  return [...counts].filter(([, count]) => count).sort((a, b) => a[1] - b[1]);
}

function keyFigures() {
  const first = DATA.passes[0], last = DATA.passes.at(-1), of = program();
  const card = (value, text) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, text));
  const cards = [];
  if (first) cards.push(card(`${number(first.kernels[0])} → ${number(last.kernels[1])}`, `kernels in the graph, before and after ${plural(DATA.passes.filter((pass) => !pass.off).length, "pass")}`));
  if (!of) return cards;
  const open = () => { openTab("passes"); changed("own"); };
  const why = last && of.passes && of.steps.length !== last.kernels[1] ? [", after ", el("button", { class: "link", onclick: open }, `passes of its own: ${number(last.kernels[1])} → ${number(of.steps.length)}`)] : [];
  cards.push(card(number(of.steps.length), ["kernels in this program", ...why]));
  const layerSteps = of.steps.filter((step) => step.layer === "0"), side = layerSteps.filter((step) => step.lane === "side").length;
  if (layerSteps.length) cards.push(card(number(layerSteps.length), `kernels for layer 0: ${layerSteps.length - side} on the main lane, ${side} on the side lane`));
  const measured = of.measured ? placed(of, true).reduce((most, each) => Math.max(most, each.end), 0) : null;
  if (measured) cards.push(card(micro(measured), `one step, measured kernel by kernel${DATA.device ? ` on ${DATA.device}` : ""}`));
  cards.push(card(micro(of.total), `one step, estimated for an ${DATA.gpu}`));
  cards.push(card(percent(of.floor / of.total), `of the floor's speed: to read weights, adapters and cache once takes ${micro(of.floor)}`));
  const hidden = hiddenShare(of);
  if (hidden !== null) cards.push(card(percent(hidden), "of the side lane's time passes during main-lane kernels"));
  cards.push(card(bytes(of.arena), `arena for activations; ${bytes(of.unshared)} if no memory were shared`));
  return cards;
}

// Why the floor is far away, where the model is too small for it; "" for others.
function whyFar(of) {
  const sum = (field) => of.steps.reduce((total, step) => total + step[field], 0), fixed = of ? sum("fixed") / sum("alone") : 0;
  return fixed < 0.5 ? "" : `Why ${percent(of.floor / of.total)} of the floor's speed: this program has little to read. Launches and latency, which no size changes, are ${percent(fixed)} of its kernels' time on an ${DATA.gpu}.`;
}

function overlaps(times, lanes, index) {
  return times.map((time, other) => other).filter((other) => lanes[other] !== lanes[index] && times[other].start < times[index].end - 1e-6 && times[index].start < times[other].end - 1e-6);
}

function hiddenShare(of) {
  const times = placed(of, false), lanes = of.steps.map((step) => step.lane);
  let all = 0, shared = 0;
  times.forEach((time, index) => {
    if (lanes[index] !== "side") return;
    all += time.end - time.start;
    for (const other of overlaps(times, lanes, index)) shared += Math.min(time.end, times[other].end) - Math.max(time.start, times[other].start);
  });
  return all ? shared / all : null;
}

function layerTable() {
  const of = program();
  if (!of) return el("p", { class: "muted" }, "No program was dumped.");
  const times = placed(of, Boolean(of.measured)), lanes = of.steps.map((step) => step.lane);
  const chosen = of.steps.map((step, index) => index).filter((index) => state.layer === "all" || of.steps[index].layer === state.layer);
  const head = ["#", "kernel", "lane", of.measured ? "measured" : "estimated", "at the same time", "floor", "of the floor", "moves", "bound by"];
  const numeric = [3, 5, 6, 7];
  const rows = chosen.map((index) => {
    const step = of.steps[index], took = takes(of, index);
    const others = overlaps(times, lanes, index).map((other) => short(of.steps[other].op)), { share } = ofFloor(of, index);
    return [String(index), el("span", { class: "nowrap" }, swatch(step.op), stepLink(index)), el("span", { class: `badge ${step.lane}` }, step.sms ? `${step.lane}, ${step.sms} SMs` : step.lane),
      micro(took), others.length ? [...new Set(others)].join(", ") : "–", micro(step.floor), el("span", {}, percent(share), bar(share)), bytes(step.bytes), step.bound];
  });
  const sum = chosen.reduce((total, index) => total + takes(of, index), 0);
  const span = Math.max(...chosen.map((index) => times[index].end)) - Math.min(...chosen.map((index) => times[index].start));
  const cells = (tag, row) => el("tr", {}, row.map((cell, place) => el(tag, { class: numeric.includes(place) ? "number" : null }, cell)));
  const note = chosen.length ? `${plural(chosen.length, "kernel")} of ${layerName(state.layer)}: ${micro(sum)} one after the other, ${micro(span)} on the two lanes.` : "This program has no kernel here.";
  return el("div", {}, el("table", {}, el("thead", {}, cells("th", head)), el("tbody", {}, rows.map((row) => cells("td", row)))), el("p", { class: "muted" }, note), el("p", { class: "muted" }, `${DATA.device === "cpu" ? "Measured on this CPU by the ops' references; shares of the floor are those of the estimates. " : ""}Estimates are for an ${DATA.gpu}; their error is ${DATA.error}.`));
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
  const refused = DATA.passes.filter((pass) => pass.rejected.length), off = DATA.passes.filter((pass) => pass.off);
  for (const pass of refused) {
    const open = () => { state.pass = DATA.passes.indexOf(pass); openTab("passes"); changed("pass"); };
    card.append(el("h3", {}, el("button", { class: "link", onclick: open }, pass.name)), reasonList(pass.rejected));
  }
  if (!refused.length) card.append(el("p", {}, "No pass refused anything that looked like its pattern."));
  const idle = DATA.passes.filter((pass) => !pass.matches && !pass.rejected.length && !pass.off).map((pass) => pass.name);
  if (idle.length) card.append(el("p", { class: "muted" }, `Nothing in this model looked like what these passes look for: ${idle.join(", ")}.`));
  if (off.length) card.append(el("p", { class: "warn" }, `Switched off by options: ${off.map((pass) => `${pass.name} (${pass.off})`).join(", ")}.`));
  card.append(el("p", { class: "muted" }, "What a program's own passes refused is under Passes."));
  return card;
}

function options() {
  const entries = Object.entries(DATA.options);
  if (!entries.length) return "";
  return el("details", { class: "card" }, el("summary", {}, "Options of this compilation"), el("dl", {}, entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: "mono" }, JSON.stringify(value))])));
}
