"""What any page of ours must hold, asked of a page that is open in a browser."""

import time

from .browser import Browser

_CONTRAST = """
const linear = (value) => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
const light = (text) => {
  const [r, g, b] = text.match(/[0-9.]+/g).map(Number);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
};
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$|transparent/.test(color)) return color;
  }
};
const poor = [];
for (const node of document.querySelectorAll('body *')) {
  if (node.closest('svg') || !node.checkVisibility()) continue;
  if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
  const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([node.tagName, node.className, node.textContent.slice(0, 30), a, b]);
}
return poor;"""
_SMALL = """
const small = [];
for (const node of document.querySelectorAll('button, select, input, textarea, summary, a[href]')) {
  if (!node.checkVisibility() || node.matches(arguments[0])) continue;
  const box = (node.closest('label') || node).getBoundingClientRect();
  const told = [node.tagName, node.className, node.textContent.slice(0, 30), box.width, box.height];
  if (box.width < 24 || box.height < 24) small.push(told);
}
return small;"""
_CUT_OFF = """
const out = [];
for (const node of document.querySelectorAll('button, select, input, textarea, h1, h2, p, td, th, dd')) {
  if (!node.checkVisibility()) continue;
  let up = node.parentElement;
  while (up && !['auto', 'scroll'].includes(getComputedStyle(up).overflowX)) up = up.parentElement;
  const box = node.getBoundingClientRect(), told = [node.tagName, node.className, node.textContent.slice(0, 30)];
  if (!up && (box.left < -1 || box.right > innerWidth + 1)) out.push([...told, box.left, box.right]);
}
return out;"""
CONTROLS = {"button", "checkbox", "combobox", "tab", "textbox", "link", "DisclosureTriangle", "spinbutton"}


def poor_contrast(window: Browser) -> list[list[object]]:
    """Visible texts whose contrast is below 4.5 (WCAG AA), outside pictures."""
    return window.run(_CONTRAST)


def small_targets(window: Browser, but: str) -> list[list[object]]:
    """Visible controls of less than 24 x 24 CSS pixels, other than those that the selector `but` names."""
    return window.run(_SMALL, but)


def cut_off(window: Browser) -> list[list[object]]:
    """What reaches out of the window sideways without a box around it that scrolls; the whole page counts too."""
    width, inner = window.run("return [document.documentElement.scrollWidth, innerWidth]")
    return window.run(_CUT_OFF) + ([["page", width, inner]] if width > inner else [])


def nameless_controls(window: Browser) -> list[str]:
    """Controls that a screen reader has no name for."""
    nodes = window.devtools("Accessibility.getFullAXTree")["nodes"]
    return [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in CONTROLS
        and not node.get("name", {}).get("value", "").strip()
    ]


def prefer(window: Browser, scheme: str) -> None:
    """Change the system's colour scheme, and wait until the page has noticed."""
    window.prefer(scheme)
    wait_for(window, f"return document.documentElement.dataset.theme === '{scheme}'")


def wait_for(window: Browser, condition: str, seconds: float = 60.0) -> None:
    """Waits until a script returns something true. Raises AssertionError when it never does."""
    deadline = time.monotonic() + seconds
    while not window.run(condition):
        assert time.monotonic() < deadline, f"never came true: {condition}"
        time.sleep(0.02)
