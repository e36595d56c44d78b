"use strict";
// Data, small DOM helpers, words for numbers, the tooltip and the colour theme: what every tab uses.

const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { program: 0, layer: "0", pass: 0, step: null };
const listeners = [];

function changed(part) { for (const [parts, listener] of listeners) if (parts.includes(part)) listener(part); }
function on(parts, listener) { listeners.push([parts, listener]); }
function program() { return DATA.programs[state.program]; }

// el("p", {class: "muted", onclick: f}, "text", node, ...)
function el(tag, attributes = {}, ...children) { return fill(document.createElement(tag), attributes, children); }
function svg(tag, attributes = {}, ...children) { return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children); }
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function family(op) { return DATA.families[op] || "other"; }
function colour(op) { return `var(--${family(op)})`; }
function swatch(op) { return el("span", { class: "swatch", style: { background: colour(op) }, "aria-hidden": "true" }); }
function short(op) { return op.replace(/^sidestream\./, ""); }

function number(value) { return value.toLocaleString("en-US"); }
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${place === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${units[place]}`;
}
function micro(value) { return value >= 1000 ? `${(value / 1000).toFixed(2)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} µs`; }
function flops(value) { return value >= 1e9 ? `${(value / 1e9).toFixed(1)} GFLOP` : `${(value / 1e6).toFixed(1)} MFLOP`; }
function percent(share) { return `${Math.round(share * 100)}%`; }
function bar(share) { return el("span", { class: "bar", "aria-hidden": "true" }, el("i", { style: { width: percent(Math.min(1, share)) } })); }
function plural(count, word) { return `${number(count)} ${word}${count === 1 ? "" : /(s|ch)$/.test(word) ? "es" : "s"}`; }
function layerName(key) { return { start: "before the layers", end: "after the layers", all: "all layers" }[key] || `layer ${key}`; }
function layerOrder(key) { return key === "start" ? -1 : key === "end" ? 1e9 : Number(key); }
function layerKeys() {
  const keys = new Set(DATA.graphs.flatMap((graph) => Object.keys(graph)));
  for (const each of DATA.programs) for (const step of each.steps) keys.add(step.layer);
  return [...keys].sort((a, b) => layerOrder(a) - layerOrder(b));
}

// Where steps lie on the time axis: estimated, or as one replay was measured.
function placed(of, measured) {
  return measured && of.measured ? of.measured.map(([start, end]) => ({ start, end })) : of.steps.map(({ start, end }) => ({ start, end }));
}
// What a step takes: measured, or estimated as if nothing ran at the same time.
function takes(of, index) { return of.measured ? of.measured[index][1] - of.measured[index][0] : of.steps[index].alone; }

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

// Arrow keys, Home and End move among the items of a container; exactly one of them is in the page's tab order.
function roving(container, selector, moved = () => {}) {
  const items = () => [...container.querySelectorAll(selector)];
  container.addEventListener("keydown", (event) => {
    const all = items(), at = all.indexOf(document.activeElement);
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all[(to + all.length) % all.length];
    next.focus();
    moved(next);
  });
  container.addEventListener("focusin", (event) => {
    const all = items();
    if (all.includes(event.target)) all.forEach((item) => item.setAttribute("tabindex", item === event.target ? "0" : "-1"));
  });
}

const tip = document.getElementById("tip");
function showTip(target, content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = target.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const below = box.bottom + own.height + 8 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left + 24, innerWidth - own.width - 8))}px`;
  tip.style.top = `${below ? box.bottom + 4 : Math.max(4, box.top - own.height - 4)}px`;
}
function hideTip() { tip.hidden = true; }
function withTip(node, content) {
  node.setAttribute("aria-describedby", "tip");
  for (const name of ["mouseenter", "focus"]) node.addEventListener(name, () => showTip(node, content()));
  for (const name of ["mouseleave", "blur"]) node.addEventListener(name, hideTip);
  return node;
}
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

function theme() {
  const remembered = () => { try { return localStorage.getItem("sidestream-theme"); } catch { return null; } };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = el("button", { id: "theme", onclick: () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("sidestream-theme", next); } catch { /* a page from a file may have no storage */ }
    apply(next);
  } });
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light theme" : "Dark theme";
  };
  dark.addEventListener("change", () => { if (!remembered()) apply(dark.matches ? "dark" : "light"); });
  apply(remembered() || (dark.matches ? "dark" : "light"));
  return button;
}
