// Calls of the gateway's API with the entered key, which is stored for this browser tab only.

const KEY = "sidestream-key";
let memoryKey = ""; // without session storage
function key() { try { return sessionStorage.getItem(KEY) || ""; } catch { return memoryKey; } }
function storeKey(text) {
  memoryKey = text;
  try { if (text) sessionStorage.setItem(KEY, text); else sessionStorage.removeItem(KEY); } catch { /* stored in memory */ }
}

class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Returns a response of the API. Errors are thrown with the gateway's message.
async function call(path, body, signal) {
  const headers = { ...(key() ? { Authorization: `Bearer ${key()}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  const below = location.pathname.replace(/\/$/, ""); // with --root-path the page is at the prefix of a proxy
  const answer = await fetch(below + path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store", credentials: "omit" });
  if (answer.ok || path === "/health") return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try { message = (await answer.json()).error.message || message; } catch { /* not a JSON error of the gateway */ }
  throw new ApiError(answer.status, message);
}

// Yields the events of a stream up to [DONE].
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended early: lost connection to the gateway");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.code, event.error.message);
      yield event;
    }
  }
}

const trouble = document.getElementById("trouble");
function showError(problem) {
  const words = problem?.status === 401 ? `This gateway needs a key: ${problem.message}` : problem instanceof TypeError ? "The gateway does not answer." : problem?.message;
  if (trouble.textContent !== (words || "")) trouble.textContent = words || "";
  trouble.hidden = !words;
}
