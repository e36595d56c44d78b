// The row of tabs: one panel each, filled when it is first shown; arrow keys move, the address's #name remembers.

const TABS = {};  // name -> {title, build(panel)}

function startTabs() {
  const row = document.getElementById("tabs"), panels = document.getElementById("panels");
  for (const [name, tab] of Object.entries(TABS)) {
    const own = { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, "aria-selected": "false", tabindex: "-1", onclick: () => openTab(name) };
    row.append(el("button", own, tab.title));
    panels.append(el("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, tabindex: "0", hidden: true }));
  }
  roving(row, "[role=tab]", (tab) => tab.click());
  addEventListener("hashchange", () => openTab(location.hash.slice(1)));
  openTab(location.hash.slice(1));
}

function openTab(wanted) {
  const name = wanted in TABS ? wanted : Object.keys(TABS)[0];
  hideTip();
  for (const other of Object.keys(TABS)) {
    const tab = document.getElementById(`tab-${other}`), chosen = other === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.setAttribute("tabindex", chosen ? "0" : "-1");
    document.getElementById(`panel-${other}`).hidden = !chosen;
  }
  const panel = document.getElementById(`panel-${name}`);
  if (!panel.firstChild) TABS[name].build(panel);
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  changed("tab");
}

// Renders into `node` now and whenever one of `parts` of the state changes, but only while its tab is shown.
function live(name, parts, render) {
  let stale = true;
  const update = () => {
    if (document.getElementById(`panel-${name}`).hidden) return;
    if (stale) { stale = false; render(); }
  };
  on([...parts, "tab"], (part) => { if (part !== "tab") stale = true; update(); });
  update();
}
