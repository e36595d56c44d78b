// The pipeline as a strip of passes, and the graph around the chosen one: before and after, one layer at a time.

TABS.passes = { title: "Passes", build(panel) {
  const strip = el("div", { class: "strip", role: "group", "aria-label": "Passes in order" }), about = el("div"), diff = el("div"), own = el("details", { class: "card" });
  const only = el("input", { type: "checkbox", onchange: () => changed("only") });
  DATA.passes.forEach((pass, index) => strip.append(passButton(pass, index)));
  roving(strip, ".pass", (button) => button.click());
  const kinds = [["del", "removed"], ["add", "added"], ["chg", "other arguments"]];
  const legend = el("span", { class: "legend" }, kinds.map(([kind, words]) => el("span", {}, el("i", { class: "swatch", style: { background: `var(--${kind})` } }), words)));
  const toolbar = el("div", { class: "toolbar" }, layerChoice(false), el("label", {}, only, "changed lines only"), legend);
  panel.append(sideways(strip), el("div", { class: "card" }, about), own, el("div", { class: "card" }, toolbar, diff));
  live("passes", ["pass"], () => {
    [...strip.children].forEach((button, index) => {
      button.setAttribute("aria-pressed", String(index === state.pass));
      button.setAttribute("tabindex", index === state.pass ? "0" : "-1");
    });
    const chosen = strip.children[state.pass];
    if (chosen) strip.scrollLeft = chosen.offsetLeft - strip.offsetLeft - (strip.clientWidth - chosen.clientWidth) / 2;
    about.replaceChildren(...(DATA.passes.length ? aboutPass(DATA.passes[state.pass]) : ["No pass was recorded."]));
  });
  live("passes", ["program"], () => { own.hidden = !program()?.passes; own.replaceChildren(...(own.hidden ? [] : ownPasses(program()))); });
  on(["own"], () => { own.open = true; own.scrollIntoView({ block: "nearest" }); own.querySelector("summary").focus(); });
  live("passes", ["pass", "layer", "only", "program"], () => { if (DATA.passes.length) showDiff(diff, DATA.passes[state.pass], only.checked); });
} };

function passButton(pass, index) {
  const measured = [pass.seconds === undefined ? null : `${(pass.seconds * 1000).toFixed(0)} ms`, pass.error === undefined ? null : `error +${pass.error.toExponential(1)}`].filter(Boolean);
  if (pass.off) return el("button", { class: `pass off ${pass.tier}`, "data-pass": pass.name, onclick: () => { state.pass = index; changed("pass"); } }, el("b", {}, `${index + 1} ${pass.name}`), el("span", { class: "warn" }, "off"), el("span", {}, pass.off));
  return el("button", { class: `pass ${pass.tier}`, "data-pass": pass.name, onclick: () => { state.pass = index; changed("pass"); } },
    el("b", {}, `${index + 1} ${pass.name}`), el("span", {}, plural(pass.matches, "match")),
    pass.rejected.length ? el("span", { class: "warn" }, `${pass.rejected.length} refused`) : el("span", {}, "none refused"),
    el("span", {}, `${number(pass.kernels[0])} → ${number(pass.kernels[1])} ops`), measured.length ? el("span", {}, measured.join(", ")) : null);
}

const TIERS = { keeps: "keeps the numbers", quantizes: "changes the numbers: it quantizes", lowers: "chooses kernels and lanes" };
function aboutPass(pass) {
  const facts = [["tier", TIERS[pass.tier] || pass.tier], ["matches", number(pass.matches)], ["kernels", `${number(pass.kernels[0])} → ${number(pass.kernels[1])}`]];
  if (pass.seconds !== undefined) facts.push(["time taken", `${(pass.seconds * 1000).toFixed(1)} ms`]);
  if (pass.error !== undefined) facts.push(["error added", pass.error.toExponential(2)]);
  if (pass.changes.length) facts.push(["ops", changes(pass.changes)]);
  const refused = pass.rejected.length ? [el("h3", {}, `${pass.rejected.length} near-misses refused`), reasonList(pass.rejected)] : [];
  return [el("h2", {}, pass.name), el("p", {}, pass.about), pass.off ? el("p", { class: "warn" }, `It is off: ${pass.off}.`) : "", el("dl", {}, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])), ...refused];
}

// What the passes on the static graph of one program did, as the compiler's own text.
function ownPasses(of) {
  const graph = DATA.passes.at(-1)?.kernels[1] ?? 0, list = againstGraph(of);
  const difference = list.length ? `Compared with the graph: ${changes(list)}. What has static sizes alone, such as a selection of all rows, is gone too.` : "They and its sizes leave the graph's kernels as they are.";
  return [el("summary", {}, el("b", {}, `The passes of ${of.name} alone: ${number(graph)} → ${number(of.steps.length)} kernels`)), el("p", {}, difference), sideways(el("pre", { class: "scroll", tabindex: "0" }, of.passes))];
}

const nameOf = (id) => (/^(\w+)( =|,)/.exec(DATA.lines[id][0]) || [])[1];

// Longest common subsequence of two lists of line numbers, as rows [before, after, state].
function align(before, after) {
  const width = after.length + 1, table = new Uint16Array((before.length + 1) * width);
  for (let i = before.length - 1; i >= 0; i -= 1) for (let j = after.length - 1; j >= 0; j -= 1)
    table[i * width + j] = before[i] === after[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  const rows = [], gone = [], come = [];
  const names = (ids) => new Set(ids.map(nameOf).filter(Boolean)), old = names(before), now = names(after);
  const row = (left, right) => rows.push([left, right, left !== undefined && now.has(nameOf(left)) ? "chg" : "del", right !== undefined && old.has(nameOf(right)) ? "chg" : "add"]);
  const flush = () => { // between two equal lines: lines with equal names are side by side
    const fresh = [];
    for (const id of come.splice(0)) {
      const at = nameOf(id) === undefined ? -1 : gone.findIndex((other) => nameOf(other) === nameOf(id));
      if (at < 0) { fresh.push(id); continue; }
      const passed = gone.splice(0, at + 1), same = passed.pop();
      while (passed.length || fresh.length) row(passed.shift(), fresh.shift());
      row(same, id);
    }
    while (gone.length || fresh.length) row(gone.shift(), fresh.shift());
  };
  let i = 0, j = 0;
  while (i < before.length || j < after.length) {
    if (i < before.length && j < after.length && before[i] === after[j]) { flush(); rows.push([before[i], after[j], "same", "same"]); i += 1; j += 1; }
    else if (j >= after.length || (i < before.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) gone.push(before[i++]);
    else come.push(after[j++]);
  }
  flush();
  return rows;
}

function showDiff(box, pass, only) {
  const key = state.layer === "all" ? "0" : state.layer;
  const before = DATA.graphs[pass.before][key] || [], after = DATA.graphs[pass.after][key] || [];
  const rows = align(before, after), shown = only ? rows.filter((row) => row[2] !== "same") : rows;
  const grid = el("div", { class: "diff" }, el("h3", {}, `Before: ${plural(before.length, "line")}`), el("h3", {}, `After: ${plural(after.length, "line")}`));
  const cells = ([left, right, was, is]) => [lineCell(left, was, "before"), lineCell(right, is, "after")];
  for (let at = 0; at < shown.length;) {
    let end = at;
    while (end < shown.length && shown[end][2] === "same" && /^\w+,/.test(DATA.lines[shown[end][0]][0])) end += 1;
    if (end - at >= 3) { grid.append(fold(shown.slice(at, end), cells)); at = end; }
    else grid.append(...cells(shown[at++]));
  }
  grid.querySelector(".line[tabindex]")?.setAttribute("tabindex", "0");
  roving(grid, ".line[tabindex]");
  const note = rows.some((row) => row[2] !== "same") ? null : el("p", { class: "muted" }, `${pass.name} changed nothing in ${layerName(key)}.`);
  box.replaceChildren(...(note ? [note] : []), grid);
}

// Unchanged inputs and weights are behind one button.
function fold(rows, cells) {
  const unfold = () => { const all = rows.flatMap(cells); button.replaceWith(...all); all[0].focus(); };
  const button = el("button", { class: "fold", onclick: unfold }, `show ${rows.length} unchanged inputs and weights`);
  return button;
}

function lineCell(id, kind, side) {
  if (id === undefined) return el("div", { class: `line ${side}` });
  const [text] = DATA.lines[id], split = text.lastIndexOf("  # "), name = nameOf(id);
  const code = split < 0 ? text : text.slice(0, split), rest = split < 0 ? "" : text.slice(split);
  const named = name && code.startsWith(name) ? [el("b", {}, name), code.slice(name.length)] : [code];
  const cell = el("div", { class: `line ${side} ${kind}`, tabindex: "-1", "data-uses": code }, ...named, rest ? el("i", {}, rest) : null);
  cell.addEventListener("focus", () => markUses(cell, name, side));
  return withTip(cell, () => lineFacts(id, kind));
}

function markUses(cell, name, side) {
  const word = name ? new RegExp(`\\b${name}\\b`) : null;
  for (const other of cell.parentNode.querySelectorAll(`.line.${side}`)) other.classList.toggle("used", Boolean(word && other !== cell && word.test(other.dataset.uses || "")));
}

function lineFacts(id, kind) {
  const [text, module, source] = DATA.lines[id];
  const facts = [el("b", {}, nameOf(id) || "return")];
  const note = { add: "added by this pass", del: "removed by this pass", chg: "same value, other arguments" }[kind];
  if (note) facts.push(` (${note})`);
  for (const [whole, dtype, sizes] of text.slice(text.lastIndexOf("  # ") + 4).matchAll(/\b(\w+)\[([^[\]]*)\]/g)) facts.push(`\n${whole}: ${sizeOf(dtype, sizes)}`);
  const lane = /(side) stream.*$/.exec(text);
  if (lane) facts.push(`\nside lane${lane[0].slice(11)}`);
  if (DATA.modules[module]) facts.push(`\nfrom ${DATA.modules[module]}`);
  if (DATA.sources[source]) facts.push(`\n${DATA.sources[source]}`);
  return facts;
}

const ITEM_BYTES = { bf16: 2, f16: 2, f32: 4, f64: 8, e4m3: 1, e5m2: 1, i8: 1, u8: 1, i16: 2, i32: 4, i64: 8, bool: 1 };
function sizeOf(dtype, sizes) {
  const bucket = program()?.bucket || {}, known = { T: bucket.tokens, B: bucket.sequences, P: bucket.blocks, NP: bucket.pages }, used = new Set();
  let total = ITEM_BYTES[dtype];
  for (const size of sizes.split(", ").filter(Boolean)) {
    const [, symbol, plus] = /^(?:([A-Z]+)\+?)?(\d*)$/.exec(size) || [null, null, null];
    if (symbol === null || (symbol && known[symbol] === undefined)) return `${ITEM_BYTES[dtype]} bytes an element`;
    if (symbol) used.add(`${symbol} = ${known[symbol]}`);
    total *= (symbol ? known[symbol] : 0) + Number(plus || 0);
  }
  return total === total ? `${bytes(total)}${used.size ? ` at ${[...used].join(", ")}` : ""}` : dtype;
}
