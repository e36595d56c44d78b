// Charts of the last day, from the samples that the gateway keeps, one a minute.

const FETCH_SECONDS = 15;
const day = { names: new Map(), samples: [], failed: [], fetched: -Infinity };

async function pollHistory() {
  const now = performance.now() / 1000;
  if (latest().limited || now - day.fetched < FETCH_SECONDS) return;
  day.fetched = now;
  const last = day.samples.at(-1), after = last ? last[day.names.get("time")] : 0;
  const report = await (await call(`/console/history?after=${after}`)).json();
  day.names = new Map(report.names.map((name, place) => [name, place]));
  day.samples = [...day.samples, ...report.samples].slice(-24 * 60);
  day.failed = report.failed;
}
function forgetHistory() { Object.assign(day, { samples: [], failed: [], fetched: -Infinity }); }

TABS.day = { title: "Day", build(panel) {
  const note = el("p", { class: "muted" }), charts = el("div", { class: "charts" });
  panel.append(note, charts);
  live("day", ["sample", "size"], () => {
    const now = latest();
    if (!now) return;
    charts.hidden = now.limited || day.samples.length < 2;
    note.textContent = now.limited ? "This key may not read the history, which covers all owners." : charts.hidden
      ? "The gateway samples its metrics once a minute; the charts begin two minutes after its start." : "One sample a minute, for up to a day since the gateway started.";
    if (charts.hidden) return;
    const wide = (charts.firstChild || panel).clientWidth - 34, at = (sample, name) => sample[day.names.get(name)];
    const line = (kind, words, value) => [kind, words, day.samples.map((sample, place) => [at(sample, "time"), place ? value(sample, day.samples[place - 1]) : null])];
    const added = (name) => (sample, former) => { const [after, before] = [at(sample, name), at(former, name)]; return after >= before ? after - before : after; };
    const share = (part, whole) => (sample, former) => { const all = added(whole)(sample, former); return all > 0 ? added(part)(sample, former) / all : null; };
    const perMinute = (name) => (sample, former) => added(name)(sample, former) * 60 / (at(sample, "time") - at(former, "time"));
    charts.replaceChildren(
      chart("Tokens a second", wide, [line("first", "all engines", (sample, former) => perMinute("tokens")(sample, former) / 60)], perSecond),
      chart("Requests a minute", wide, [line("first", "ended", perMinute("requests")), line("second", "failed", perMinute("failed")), line("third", "refused (429)", perMinute("refused"))], perSecond),
      chart("Mean times", wide, [line("first", "to the first token", share("first_token_seconds", "first_tokens")), line("second", "in the queue", share("queue_seconds", "queued"))], seconds),
      chart("Requests", wide, [line("first", "running", (sample) => at(sample, "running")), line("second", "waiting", (sample) => at(sample, "waiting"))], perSecond),
      chart("Shares", wide, [line("first", "prefix cache", share("prefix_hits", "prefix_queries")), line("second", "KV pages in use", (sample) => (at(sample, "pages") ? at(sample, "pages_in_use") / at(sample, "pages") : null)),
        line("third", "drafts accepted", share("accepted_tokens", "draft_tokens"))], (value) => (value === null ? "–" : percent(value))),
    );
  });
} };
