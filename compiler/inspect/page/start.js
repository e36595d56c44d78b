// Title, the choice of program, and the first tab.

document.getElementById("title").textContent = DATA.title;
document.getElementById("subtitle").append(
  `Sidestream ${DATA.version}: ${plural(DATA.passes.filter((pass) => !pass.off).length, "pass")}${DATA.passes.some((pass) => pass.off) ? ` (${DATA.passes.filter((pass) => pass.off).length} off)` : ""}, ${plural(DATA.programs.length, "program")}. Times are estimates for an ${DATA.gpu}, unless marked as measured.`,
);
if (DATA.programs.length > 1) {
  const choose = () => { state.program = Number(choice.value); state.step = null; changed("program"); };
  const choice = el("select", { id: "program", "aria-label": "Program", onchange: choose }, DATA.programs.map((each, index) => el("option", { value: index }, each.name)));
  document.getElementById("controls").append(el("label", {}, el("span", { class: "hide-small" }, "Program"), choice));
}
document.getElementById("controls").append(theme());
if (!layerKeys().includes("0")) state.layer = layerKeys()[0] || "all";
startTabs();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; changed("size"); } });
