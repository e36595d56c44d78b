// Title, key form, tabs, and polling: every two seconds while the page is visible.

const badge = document.getElementById("status"), about = document.getElementById("subtitle"), release = about.textContent;
const typed = el("input", { id: "key", type: "password", autocomplete: "off", placeholder: "API key", "aria-label": "API key", value: "" });
const use = el("button", { type: "submit" }, "Use key"), forget = el("button", { type: "button", id: "forget", onclick: () => useKey("") }, "Forget key");
document.getElementById("controls").append(el("form", { onsubmit: (event) => { event.preventDefault(); useKey(typed.value.trim()); } }, typed, use, forget), theme());

function useKey(text) {
  storeKey(text);
  typed.value = "";
  samples.length = 0;
  forgetHistory();
  showKey();
  tick();
}
function showKey() { typed.hidden = use.hidden = Boolean(key()); forget.hidden = !key(); }

let polling = false;
async function tick() {
  if (polling || document.hidden) return;
  polling = true;
  try {
    await poll();
    await pollHistory();
    showError(null);
    const { health, models } = latest(), base = models.find((card) => !card.parent), adapters = models.filter((card) => card.parent).length;
    badge.textContent = health.status + (health.status === "loading" ? ` ${percent(health.progress)}` : "");
    badge.className = `badge ${health.status === "ok" ? "ok" : health.status === "dead" ? "bad" : ""}`;
    about.textContent = `${base ? `${base.id}, ` : ""}${plural(adapters, "adapter")}, ${plural(Object.keys(health.engines).length, "engine")}, ${release}`;
  } catch (problem) {
    showError(problem);
    badge.textContent = problem.status === 401 ? "needs a key" : problem instanceof TypeError ? "no answer" : `error ${problem.status || ""}`;
    badge.className = "badge bad";
  } finally { polling = false; }
  changed("sample");
}

showKey();
startTabs();
tick();
setInterval(tick, EVERY);
document.addEventListener("visibilitychange", tick);
addEventListener("resize", () => changed("size"));
