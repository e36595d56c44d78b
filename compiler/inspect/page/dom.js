"use strict";
// Small DOM helpers, words for numbers, listeners, the tooltip and the colour theme: what every page of ours uses.

const listeners = [];

function changed(part) { for (const [parts, listener] of listeners) if (parts.includes(part)) listener(part); }
function on(parts, listener) { listeners.push([parts, listener]); }

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

function number(value) { return value.toLocaleString("en-US"); }
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${place === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${units[place]}`;
}
function percent(share) { return share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`; }
function bar(share) { return el("span", { class: "bar", "aria-hidden": "true" }, el("i", { style: { width: `${Math.min(100, share * 100)}%` } })); }
function plural(count, word) { return `${number(count)} ${word}${count === 1 ? "" : /(s|ch)$/.test(word) ? "es" : "s"}`; }

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

// A box that scrolls sideways: it fades at an end where it goes on, and has an arrow there.
function sideways(node) {
  const arrow = (side, sign, by) => el("button", { class: `more ${side}`, tabindex: "-1", "aria-hidden": "true", onclick: () => { node.scrollLeft += by * node.clientWidth * 0.8; } }, sign);
  const box = el("div", { class: "sideways" }, node, arrow("left", "‹", -1), arrow("right", "›", 1));
  const update = () => {
    box.classList.toggle("on-left", node.scrollLeft > 1);
    box.classList.toggle("on-right", node.scrollLeft + node.clientWidth < node.scrollWidth - 1);
  };
  node.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(node);
  new MutationObserver(update).observe(node, { childList: true });
  return box;
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
