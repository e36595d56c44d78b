// The schedule: time runs down, main lane left, side lane right, waits as arrows; above it the whole step as a map.

TABS.schedule = { title: "Schedule", build(panel) {
  if (!program()) { panel.append(el("p", {}, "No program was dumped.")); return; }
  const map = el("div", { class: "card" }), drawing = el("div"), facts = el("aside", { class: "card", "aria-live": "polite" });
  const view = { zoom: 1, measured: true, facts };
  const rescale = (by) => { view.zoom = Math.min(8, Math.max(0.25, view.zoom * by)); changed("zoom"); };
  const zoom = (text, name, by) => el("button", { "aria-label": name, onclick: () => rescale(by) }, text);
  const source = el("select", { id: "durations", onchange: () => { view.measured = source.value === "measured"; changed("zoom"); } },
    el("option", { value: "measured" }, "measured"), el("option", { value: "estimated" }, "estimated"));
  const durations = el("label", {}, "Durations", source);
  const toolbar = el("div", { class: "toolbar" }, layerChoice(true), zoom("−", "shorter", 1 / 1.5), zoom("+", "longer", 1.5), durations);
  panel.append(map, el("div", { class: "split" }, el("div", { class: "card" }, toolbar, legend([["var(--wait)", "left edge: on the critical path"]]), drawing), facts));
  live("schedule", ["program", "layer", "zoom", "size"], () => {
    const of = program(), times = placed(of, view.measured);
    durations.hidden = !of.measured;
    map.replaceChildren(...stepMap(of, times));
    drawLanes(drawing, of, times, view);
  });
  live("schedule", ["program", "step", "layer", "zoom", "size"], () => {
    if (state.step !== null && state.step >= program().steps.length) state.step = null;
    for (const box of drawing.querySelectorAll(".step")) box.classList.toggle("chosen", Number(box.dataset.step) === state.step);
    const hint = el("p", { class: "muted" }, "Choose a kernel: click it, or move with the arrow keys and press Enter.");
    facts.replaceChildren(...(state.step === null ? [hint] : stepFacts(state.step)));
  });
} };
on(["step"], () => { // a step that was chosen elsewhere brings its layer into view
  const step = state.step === null ? null : program()?.steps[state.step];
  if (step && state.layer !== "all" && step.layer !== state.layer) { state.layer = step.layer; changed("layer"); }
});

function legend(others) {
  const names = [...new Set(DATA.programs.flatMap((each) => each.steps).map((step) => family(step.op)))];
  const entry = ([background, words]) => el("span", {}, el("i", { class: "swatch", style: { background } }), words);
  return el("div", { class: "legend" }, names.map((name) => entry([`var(--${name})`, name])), others.map(entry));
}

function stepMap(of, times) {
  const total = Math.max(...times.map((time) => time.end)), height = 46, chart = svg("svg", { class: "chart", viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "The whole step from left to right" });
  of.steps.forEach((step, index) => {
    const { start, end } = times[index], y = step.lane === "main" ? 2 : 25;
    chart.append(svg("rect", { x: start / total * 1000, width: Math.max(0.4, (end - start) / total * 1000), y, height: 19, style: { fill: colour(step.op) } }));
  });
  const own = times.filter((_, index) => of.steps[index].layer === state.layer);
  if (own.length) {
    const start = Math.min(...own.map((time) => time.start)), end = Math.max(...own.map((time) => time.end));
    chart.append(svg("rect", { class: "window", x: start / total * 1000, width: (end - start) / total * 1000, y: 0, height }));
  }
  chart.style.height = `${height}px`;
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * total, hit = times.findIndex((time) => time.end >= at);
    if (hit >= 0) { state.layer = of.steps[hit].layer; changed("layer"); }
  });
  const words = `The whole step: ${micro(total)}, ${plural(of.steps.length, "kernel")}; main lane above, side lane below. A click goes to that layer.`;
  return [el("div", { class: "muted" }, words), chart];
}

function drawLanes(box, of, times, view) {
  const all = state.layer === "all", shown = of.steps.map((_, index) => index).filter((index) => all || of.steps[index].layer === state.layer);
  if (!shown.length) { box.replaceChildren(el("p", { class: "muted" }, "This program has no kernel here.")); return; }
  const start = Math.min(...shown.map((index) => times[index].start)), end = Math.max(...shown.map((index) => times[index].end));
  const shortest = Math.min(...shown.map((index) => times[index].end - times[index].start));
  const scale = Math.min(16, Math.max(3, 19 / shortest)) * view.zoom, height = (end - start) * scale + 2, width = box.clientWidth || 600;
  const ruler = 46, gap = Math.max(26, Math.min(70, width * 0.08)), two = of.steps.some((step) => step.lane === "side");
  const mainWidth = two ? (width - ruler - gap) * 0.58 : width - ruler, left = { main: ruler, side: ruler + mainWidth + gap }, wide = { main: mainWidth, side: width - ruler - mainWidth - gap };
  const y = (time) => (time - start) * scale, picture = svg("svg", { "aria-hidden": "true" });
  const head = { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" };
  picture.append(svg("defs", {}, svg("marker", head, svg("path", { class: "waithead", d: "M0 0L8 4L0 8z" }))));
  const each = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((size) => size * scale >= 42) || 1000;
  for (let tick = Math.ceil(start / each) * each; tick <= end; tick += each) picture.append(
    svg("line", { class: "tick", x1: ruler - 6, x2: width, y1: y(tick), y2: y(tick) }),
    svg("text", { class: "axis", x: ruler - 9, y: y(tick) + 4, "text-anchor": "end" }, String(tick)),
  );
  const lanes = el("div", { class: "lanes", style: { height: `${height}px` } }, picture), critical = new Set(of.critical);
  for (const index of shown) {
    const step = of.steps[index], high = Math.max(2, y(times[index].end) - y(times[index].start) - 1);
    const style = { left: `${left[step.lane]}px`, width: `${wide[step.lane]}px`, top: `${y(times[index].start)}px`, height: `${high}px`, background: colour(step.op) };
    const button = el("button", { class: `step ${high < 13 ? "tiny" : high > 30 ? "tall" : ""} ${wide[step.lane] < 220 ? "narrow" : ""} ${critical.has(index) ? "critical" : ""}`, style, tabindex: "-1", "data-step": index,
      "aria-label": `${index} ${short(step.op)}, ${step.lane} lane, ${micro(times[index].end - times[index].start)}`, onclick: () => { state.step = index; changed("step"); bringInto(view.facts); } },
    el("span", {}, `${index} ${short(step.op)}`),
    el("span", {}, step.sms ? el("span", { class: "hide-small" }, `${step.sms} SMs  `) : null, `${micro(times[index].end - times[index].start)}`));
    const place = `${step.lane} lane, ${step.sms ? `at most ${step.sms} SMs` : "all SMs"}`;
    lanes.append(withTip(button, () => [el("b", {}, step.op), `\n${place}\n${micro(times[index].end - times[index].start)}, floor ${micro(step.floor)}, ${bytes(step.bytes)}`]));
    for (const wait of step.waits) {
      const from = of.steps[wait].lane === "main" ? left.main + wide.main : left.side, to = step.lane === "main" ? left.main + wide.main : left.side;
      const y1 = Math.max(0, y(times[wait].end) - 2), y2 = y(times[index].start) + Math.min(8, high / 2), bend = (from + to) / 2;
      picture.append(svg("path", { class: "wait", d: `M${from} ${y1}C${bend} ${y1} ${bend} ${y2} ${to} ${y2}`, "marker-end": "url(#head)" }));
    }
  }
  (lanes.querySelector(`[data-step="${state.step}"]`) || lanes.querySelector(".step")).setAttribute("tabindex", "0");
  roving(lanes, ".step");
  const names = el("div", { class: "lane-names" }, el("span", { class: "muted", style: { left: "0", fontWeight: "400" } }, "µs"), el("span", { style: { left: `${left.main}px` } }, "main lane"), two ? el("span", { style: { left: `${left.side}px` } }, "side lane") : null);
  box.replaceChildren(names, lanes);
}

function stepFacts(index) {
  const of = program(), step = of.steps[index], took = takes(of, index), machine = machineCode(step), reached = ofFloor(of, index);
  const jump = (other) => el("button", { class: "link mono", onclick: () => { state.step = other; changed("step"); } }, `${other} ${short(of.steps[other].op)}`);
  const after = of.steps.map((_, other) => other).filter((other) => of.steps[other].waits.includes(index));
  const list = (items) => items.length ? items.flatMap((item, place) => place ? [", ", item] : [item]) : ["nothing"];
  const place = `${step.lane}, ${step.sms ? `at most ${step.sms} SMs` : "all SMs"}`;
  const facts = [["kernel", `${index} ${step.name}`], ["layer", layerName(step.layer)], ["lane", place + (step.pdl ? ", programmatic dependent launch" : "")],
    ["waits for", list(step.waits.map(jump))], ["waited for by", list(after.map(jump))],
    ["placed", `${micro(step.start)} to ${micro(step.end)} (estimate)`],
    ["alone", `${micro(step.alone)} estimated, of it ${micro(step.fixed)} launch and latency`],
    of.measured ? ["measured", `${micro(took)}${DATA.device ? ` on ${DATA.device}` : ""}`] : null,
    ["floor", `${micro(step.floor)} for ${bytes(step.bytes)}${step.link_bytes ? `, ${bytes(step.link_bytes)} over NVLink` : ""}${step.flops ? ` and ${flops(step.flops)}` : ""}`],
    ["floor reached", el("span", {}, percent(reached.share), bar(reached.share), reached.measured ? " measured" : " estimated")],
    ["bound by", step.bound], machine ? [DATA.target ? `on ${DATA.target}` : "launches", machine] : null, ["settings", step.settings || "none"], ["critical path", of.critical.includes(index) ? "yes: a faster one shortens the step" : "no"]].filter(Boolean);
  const source = step.op in DATA.ops ? el("p", {}, el("button", { class: "link", onclick: () => { state.op = step.op; openTab("kernels"); changed("op"); } }, "Read its source")) : "";
  const table = el("dl", {}, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  return [el("h2", { class: "mono" }, swatch(step.op), short(step.op)), table, source, el("h3", {}, "Reads"), bufferTable(step.reads), el("h3", {}, "Writes"), bufferTable(step.writes)];
}

function bufferTable(tensors) {
  if (!tensors.length) return el("p", { class: "muted" }, "nothing of its own (in place)");
  const row = ([place, shape]) => {
    const [name, kind, , size] = program().buffers[place];
    return el("tr", {}, el("td", { class: "mono", title: DATA.recipes[name] || null }, name, el("div", { class: "muted" }, shape)), el("td", {}, kind), el("td", { class: "number" }, bytes(size)));
  };
  return el("table", {}, el("thead", {}, el("tr", {}, ["buffer", "kind", "size"].map((text, place) => el("th", { class: place === 2 ? "number" : null }, text)))), el("tbody", {}, tensors.map(row)));
}
