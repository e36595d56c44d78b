// The gateway's API, with the key that was typed in. It is kept for this browser tab only.

const KEY = "sidestream-key";
let forgotten = ""; // where there is no storage
function key() { try { return sessionStorage.getItem(KEY) || ""; } catch { return forgotten; } }
function keep(text) {
  forgotten = text;
  try { if (text) sessionStorage.setItem(KEY, text); else sessionStorage.removeItem(KEY); } catch { /* kept in memory */ }
}

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// An answer of the API; what it refuses is thrown with the gateway's own words.
async function call(path, body, signal) {
  const headers = { ...(key() ? { Authorization: `Bearer ${key()}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store", credentials: "omit" });
  if (answer.ok || path === "/health") return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try { message = (await answer.json()).error.message || message; } catch { /* no body of ours */ }
  throw new Refused(answer.status, message);
}

// What the events of a stream hold, to its [DONE].
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended early: the gateway or the connection went away");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(event.error.code, event.error.message);
      yield event;
    }
  }
}

const trouble = document.getElementById("trouble");
function tell(problem) {
  const words = problem?.status === 401 ? `This gateway wants a key: ${problem.message}` : problem instanceof TypeError ? "The gateway does not answer." : problem?.message;
  if (trouble.textContent !== (words || "")) trouble.textContent = words || "";
  trouble.hidden = !words;
}
