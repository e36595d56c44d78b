// The memory plan: steps from left to right, the arena's bytes upwards, each buffer a rectangle as long as it lives.

TABS.memory = { title: "Memory", build(panel) {
  if (!program()) { panel.append(el("p", {}, "No program was dumped.")); return; }
  const drawing = el("div"), about = el("p"), facts = el("aside", { class: "card", "aria-live": "polite" });
  panel.append(el("div", { class: "split" }, el("div", { class: "card" }, el("h2", {}, "The arena over one step"), about, el("div", { class: "toolbar" }, layerChoice(true)), legend([["var(--accent)", "line: bytes in use"]]), drawing), facts));
  live("memory", ["program", "layer", "size"], () => {
    const of = program(), kinds = sums(of);
    const count = plural(of.buffers.filter((buffer) => buffer[4] !== null).length, "buffer");
    about.textContent = `${bytes(of.arena)} of arena hold ${count} that would take ${bytes(of.unshared)} side by side. Outside of it: ${kinds}.`;
    facts.replaceChildren(el("p", { class: "muted" }, "Choose a buffer: click it, or move with the arrow keys and press Enter."));
    drawMemory(drawing, of, facts);
  });
} };

function sums(of) {
  const totals = {};
  for (const [, kind, , size] of of.buffers) if (kind !== "temp") totals[kind] = (totals[kind] || 0) + size;
  return Object.entries(totals).map(([kind, size]) => `${kind} ${bytes(size)}`).join(", ");
}

function drawMemory(box, of, facts) {
  const own = of.steps.map((_, index) => index).filter((index) => state.layer === "all" || of.steps[index].layer === state.layer);
  if (!own.length || !of.arena) { box.replaceChildren(el("p", { class: "muted" }, "Nothing lies in the arena here.")); return; }
  const first = own[0], last = own.at(-1), width = box.clientWidth || 600, height = 430, left = 66, bottom = 26, top = 14;
  const x = (step) => left + (step - first) / (last - first + 1) * (width - left - 6), y = (offset) => height - bottom - offset / of.arena * (height - bottom - top);
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Buffers over time" });
  for (const size of [0, 1, 2, 3, 4].map((part) => of.arena * part / 4)) chart.append(
    svg("line", { class: "tick", x1: left, x2: width - 6, y1: y(size), y2: y(size) }),
    svg("text", { class: "axis", x: left - 5, y: y(size) + 4, "text-anchor": "end" }, bytes(size)),
  );
  const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(3, width / 55)));
  for (let step = first; step <= last; step += every) chart.append(svg("text", { class: "axis", x: x(step), y: height - 9 }, String(step)));
  const maker = new Map();
  of.steps.forEach((step) => step.writes.forEach(([place]) => { if (!maker.has(place)) maker.set(place, step.op); }));
  of.buffers.forEach((buffer, place) => {
    const [name, , shape, size, offset, from, to] = buffer;
    if (offset === null || !size || to < first || from > last) return;
    const begin = x(Math.max(from, first)), end = x(Math.min(to, last) + 1), op = maker.get(place) || "";
    const bounds = { x: begin, width: Math.max(1, end - begin - 0.5), y: y(offset + size), height: Math.max(1.5, y(offset) - y(offset + size)), rx: 2 };
    const rect = svg("rect", { class: "rect", ...bounds, style: { fill: colour(op) }, tabindex: "-1", role: "button", "aria-label": `${name}, ${bytes(size)}, steps ${from} to ${to}` });
    const choose = () => {
      chart.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
      rect.classList.add("chosen");
      facts.replaceChildren(...bufferFacts(of, place));
      bringInto(facts);
    };
    rect.addEventListener("click", choose);
    rect.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
    chart.append(withTip(rect, () => [el("b", {}, name), `\n${shape}, ${bytes(size)}\nsteps ${from} to ${to}, at ${bytes(offset)}`]));
  });
  const used = own.length > 1 ? liveBytes(of, first, last) : [];
  const outline = used.map((size, index) => `${index ? "L" : "M"}${x(first + index)} ${y(size)}H${x(first + index + 1)}`).join("");
  chart.append(svg("path", { class: "live", d: outline }), svg("line", { class: "high", x1: left, x2: width - 6, y1: y(of.arena), y2: y(of.arena) }));
  chart.querySelector(".rect")?.setAttribute("tabindex", "0");
  roving(chart, ".rect");
  const most = bytes(Math.max(0, ...liveBytes(of, first, last)));
  box.replaceChildren(chart, el("p", { class: "muted" }, `Steps ${first} to ${last} (${layerName(state.layer)}). Dashed: the arena's high-water mark, ${bytes(of.arena)}. `
    + `Blue line: bytes in use, at most ${most} here. The colour of a buffer is that of the kernel that writes it.`));
}

function liveBytes(of, first, last) {
  const used = new Array(last - first + 1).fill(0);
  for (const [, , , size, , from, to] of of.buffers.filter((buffer) => buffer[4] !== null)) for (let step = Math.max(from, first); step <= Math.min(to, last); step += 1) used[step - first] += size;
  return used;
}

function bufferFacts(of, place) {
  const [name, , shape, size, offset, from, to] = of.buffers[place];
  const users = (field) => of.steps.map((_, index) => index).filter((index) => of.steps[index][field].some(([other]) => other === place));
  const links = (indices) => indices.flatMap((index, at) => [at ? ", " : "", `${index} `, stepLink(index)]);
  const rows = [["holds", shape], ["size", `${bytes(size)} (${number(size)} bytes)`], ["place", `${number(offset)} to ${number(offset + size)}`],
    ["lives", `steps ${from} to ${to}`], ["written by", links(users("writes"))], ["read by", links(users("reads"))]];
  return [el("h2", { class: "mono" }, name), el("dl", {}, rows.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]))];
}
