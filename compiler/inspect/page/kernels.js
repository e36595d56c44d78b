// The source text of each op that the programs call: its kernels, the reference that specifies it, its launch.

TABS.kernels = { title: "Kernels", build(panel) {
  const names = Object.keys(DATA.ops);
  if (!names.length) { panel.append(el("p", {}, "No program was dumped, or none calls an op of Sidestream.")); return; }
  const list = el("div", { class: "oplist", role: "group", "aria-label": "Ops" }), text = el("div");
  state.op = state.op || names[0];
  for (const name of names) list.append(el("button", { "data-op": name, onclick: () => { state.op = name; changed("op"); } }, short(name)));
  roving(list, "button", (button) => button.click());
  panel.append(list, text);
  live("kernels", ["op", "program"], () => {
    for (const button of list.children) {
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
  const compiled = op.kernels.some((kernel) => DATA.functions[kernel].resources) ? ` Registers, spills and shared memory: the most of what the dumped programs compile to for ${DATA.target}.` : "";
  const many = op.kernels.length > 1 ? ` ${op.kernels.length} kernels are its own; the launch chooses by shape.` : "";
  return [el("div", { class: "card" }, el("h2", { class: "mono" }, swatch(name), name), el("p", {}, use + many + compiled), ...op.kernels.map((kernel, index) => sourceOf(kernel, index === 0)),
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
  if (!DATA.variants || !(step.op in DATA.ops)) return null;
  if (!step.variants.length) return DATA.refused[step.op] ? `not compiled: ${DATA.refused[step.op]}` : "a kernel of another library";
  return step.variants.map((place) => el("div", {}, el("span", { class: "mono" }, DATA.variants[place][0].split(".").at(-1)), `: ${takesOfGpu(DATA.variants[place][1])}`));
}

function sourceOf(name, open) {
  const entry = DATA.functions[name], box = el("details", { open }), resources = entry.resources ? `: ${takesOfGpu(entry.resources)}` : "";
  const unused = DATA.variants && entry.kind === "kernel" && !entry.resources ? ", launched by none of these programs" : "";
  box.append(el("summary", {}, el("b", { class: "mono" }, name.split(".").at(-1)), ` ${entry.language} ${entry.kind}`, el("b", {}, resources), el("span", { class: "muted" }, `${unused}  ${entry.file}:${entry.line}`)));
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
