// Streams the same prompt to two adapters at once.

TABS.playground = { title: "Playground", build(panel) {
  const prompt = el("textarea", { id: "prompt", rows: 4, "aria-describedby": "prompt-hint" }), most = el("input", { id: "most", type: "number", min: 1, max: 100000, value: 128 });
  const heat = el("input", { id: "heat", type: "number", min: 0, max: 2, step: 0.1, value: 0 }), chat = el("input", { id: "chat", type: "checkbox" });
  const go = el("button", { class: "primary", type: "submit", id: "go" }, "Stream to both"), stop = el("button", { type: "button", id: "stop", disabled: true, onclick: () => running?.abort() }, "Stop");
  const sides = ["left", "right"].map(answerSide), progress = el("p", { class: "muted", role: "status", id: "progress" });
  let running = null;
  const form = el("form", { id: "ask", onsubmit: (event) => { event.preventDefault(); run(); } },
    el("label", { for: "prompt" }, "Prompt"), prompt, el("label", {}, "At most", most, "tokens"), el("label", {}, "Temperature", heat), el("label", {}, chat, "as a chat message"), go, stop);
  prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); } });
  panel.append(el("div", { class: "card" }, form, el("p", { class: "muted", id: "prompt-hint" }, "Ctrl+Enter in the prompt starts, too.")), progress, el("div", { class: "answers" }, sides.map((side) => side.box)));
  live("playground", ["sample"], () => { for (const [place, side] of sides.entries()) side.offer(latest()?.models || [], place); });

  async function run() {
    if (running || !prompt.value) { prompt.focus(); return; }
    running = new AbortController();
    go.disabled = true; stop.disabled = false; progress.textContent = "Streaming to both.";
    const shared = { max_tokens: most.valueAsNumber || 128, temperature: heat.valueAsNumber || 0, stream: true, stream_options: { include_usage: true } };
    const asked = chat.checked ? ["/v1/chat/completions", { ...shared, messages: [{ role: "user", content: prompt.value }] }] : ["/v1/completions", { ...shared, prompt: prompt.value }];
    const ends = await Promise.all(sides.map((side) => side.stream(...asked, running.signal)));
    progress.textContent = ends.join(" ");
    running = null; go.disabled = false; stop.disabled = true;
  }
} };

function answerSide(name) {
  const choice = el("select", { id: `model-${name}` }), text = el("div", { class: "answer", id: `answer-${name}`, tabindex: "0", role: "region", "aria-label": `Answer on the ${name}` }), facts = el("p", { class: "facts muted" });
  const box = el("div", { class: "card" }, el("label", { class: "grow" }, "Model", choice), text, facts);
  const offer = (models, place) => {
    const names = models.map((card) => card.id);
    if (names.join("\n") === [...choice.options].map((option) => option.value).join("\n")) return;
    const before = choice.value, adapters = models.filter((card) => card.parent).map((card) => card.id);
    choice.replaceChildren(...models.map((card) => el("option", { value: card.id }, card.parent ? card.id : `${card.id} (base)`)));
    choice.value = names.includes(before) ? before : adapters[place] || adapters[0] || names[0] || "";
  };
  async function stream(path, body, signal) {
    const began = performance.now(), model = choice.value;
    let first = null, last = null, usage = null, reason = null;
    text.textContent = ""; facts.textContent = "waiting for the first token"; text.classList.add("busy");
    const show = () => {
      if (first === null) return;
      const made = usage?.completion_tokens, spent = (last - first) / 1000;
      facts.textContent = [`first token after ${seconds((first - began) / 1000)}`, made ? plural(made, "token") : null, made > 1 && spent > 0 ? `${perSecond((made - 1) / spent)} tokens/s` : null, reason ? `ended by ${reason}` : null].filter(Boolean).join(" · ");
    };
    try {
      for await (const event of events(await call(path, { ...body, model }, signal))) {
        usage = event.usage || usage;
        for (const each of event.choices) {
          const piece = each.text ?? (each.delta?.reasoning_content ?? "") + (each.delta?.content ?? "");
          if (piece) { first ??= performance.now(); last = performance.now(); text.append(piece); }
          reason = each.finish_reason || reason;
        }
        show();
      }
      return `${model} has answered.`;
    } catch (problem) {
      const words = signal.aborted ? "stopped" : problem.message;
      facts.textContent = words;
      facts.classList.toggle("warn", !signal.aborted);
      return `${model}: ${words}.`;
    } finally { text.classList.remove("busy"); }
  }
  return { box, offer, stream: (...all) => { facts.classList.remove("warn"); return stream(...all); } };
}
