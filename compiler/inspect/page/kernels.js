// The source text of each op: its kernels, the reference that specifies it, its launch; what this program calls comes first.

TABS.kernels = { title: "Kernels", build(panel) {
  const names = Object.keys(DATA.ops);
  if (!names.length) { panel.append(el("p", {}, "No program was dumped, or none calls an op of Sidestream.")); return; }
  const list = el("div", { class: "oplist", role: "group", "aria-label": "Ops" }), text = el("div");
  const button = (name, calls) => el("button", { "data-op": name, onclick: () => { state.op = name; changed("op"); } }, short(name), calls ? el("span", { class: "muted" }, ` × ${calls}`) : null);
  roving(list, "button", (chosen) => chosen.click());
  panel.append(list, text);
  live("kernels", ["program"], () => {
    const calls = (name) => (program()?.steps || []).filter((step) => step.op === name), time = (name) => calls(name).reduce((sum, step) => sum + step.alone, 0);
    const called = names.filter((name) => calls(name).length).sort((a, b) => time(b) - time(a)), others = names.filter((name) => !calls(name).length);
    if (!called.includes(state.op)) state.op = (called.length ? called : names)[0];
    list.replaceChildren(...called.map((name) => button(name, calls(name).length)), others.length ? el("span", { class: "muted" }, "in other programs:") : "", ...others.map((name) => button(name, 0)));
  });
  live("kernels", ["op", "program"], () => {
    for (const button of list.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.op === state.op));
      button.setAttribute("tabindex", button.dataset.op === state.op ? "0" : "-1");
    }
    text.replaceChildren(...opSources(state.op));
  });
} };

function opSources(name) {
  const op = DATA.ops[name], steps = (program()?.steps || []).filter((step) => step.op === name);
  const total = steps.reduce((sum, step) => sum + step.alone, 0);
  const use = steps.length ? `${plural(steps.length, "call")} in this program, ${micro(total)} estimated in all.` : "This program does not call it.";
  const launches = (kernel) => steps.reduce((sum, step) => sum + step.kernels.filter((place) => DATA.launched[place] === kernel).length, 0);
  const known = steps.some((step) => step.kernels.length), kernels = [...op.kernels].sort((a, b) => launches(b) - launches(a));
  const note = (kernel) => !known ? "" : launches(kernel) ? `, launched ${launches(kernel) === 1 ? "once" : `${number(launches(kernel))} times`}` : ", not launched by this program";
  const compiled = op.kernels.some((kernel) => DATA.functions[kernel].resources) ? ` Registers, spills and shared memory: the most of what the dumped programs compile to for ${DATA.target}.` : "";
  const many = op.kernels.length > 1 ? ` ${op.kernels.length} kernels are its own; the launch chooses by shape.` : "";
  return [el("div", { class: "card" }, el("h2", { class: "mono" }, swatch(name), name), el("p", {}, use + many + compiled), ...kernels.map((kernel, index) => sourceOf(kernel, index === 0, note(kernel))),
    el("h3", {}, "What it computes: the reference in plain torch"), sourceOf(op.reference, !op.kernels.length), el("h3", {}, "How it is launched"), sourceOf(op.launch, false),
    op.helpers.length ? el("h3", {}, "Device functions that the kernels call") : "", ...op.helpers.map((helper) => sourceOf(helper, false)))];
}

// Registers and spills a thread, shared memory a CTA.
function takesOfGpu(own) {
  const words = [["registers", (count) => `${count} registers`], ["spills", (count) => `${count} spilled`], ["shared_bytes", (size) => `${bytes(size)} shared memory`], ["warps", (count) => plural(count, "warp")]];
  return words.filter(([key]) => own[key] !== undefined).map(([key, say]) => say(own[key])).join(", ");
}

// What the kernels of a step take; null where nothing was compiled.
function machineCode(step) {
  if (!(step.op in DATA.ops)) return null;
  if (!DATA.variants) return step.kernels.length ? step.kernels.map((place) => DATA.launched[place].split(".").at(-1)).join(", then ") : null;
  if (!step.variants.length) return DATA.refused[step.op] ? `not compiled: ${DATA.refused[step.op]}` : "a kernel of another library";
  return step.variants.map((place) => el("div", {}, el("span", { class: "mono" }, DATA.variants[place][0].split(".").at(-1)), `: ${takesOfGpu(DATA.variants[place][1])}`));
}

function sourceOf(name, open, note = "") {
  const entry = DATA.functions[name], box = el("details", { open }), resources = entry.resources ? `: ${takesOfGpu(entry.resources)}` : "";
  box.append(el("summary", {}, el("b", { class: "mono" }, name.split(".").at(-1)), ` ${entry.language} ${entry.kind}`, el("b", {}, resources), el("span", { class: "muted" }, `${note}  ${entry.file}:${entry.line}`)));
  const write = () => { if (box.open && box.children.length === 1) box.append(el("pre", { class: "source", tabindex: "0" }, highlight(entry.text))); };
  box.addEventListener("toggle", write);
  write();
  return box;
}

const PYTHON = /("""[\s\S]*?"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(#[^\n]*)|\b(def|return|if|elif|else|for|while|in|not|and|or|is|None|True|False|with|as|from|import|lambda|raise|range|static_range|pass|break|continue)\b|(@[\w.]+)/g;
function highlight(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(PYTHON)) {
    parts.push(text.slice(at, found.index), el("span", { class: found[1] ? "s" : found[2] ? "c" : "k" }, found[0]));
    at = found.index + found[0].length;
  }
  return [...parts, text.slice(at)];
}
