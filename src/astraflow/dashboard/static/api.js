// Calls to the server that this page came from. The token stays in this tab: it is sent in a header and stands in no address.

const KEY = "astraflow-token";

export class NeedsToken extends Error {}

// `#token=…`, as `astraflow view` prints it, is taken out of the address at once.
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  setToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname + "#live");
}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { Accept: "application/json", ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(`/view/${path}`, { ...options, headers, signal: AbortSignal.timeout(options.timeout_ms || 20000) });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try { message = JSON.parse(text).message || text; } catch { /* plain text */ }
  if (answer.status === 401) throw new NeedsToken(message);
  throw new Error(message || `HTTP ${answer.status}`);
}

export function query(values) {
  return new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined)).toString();
}

export async function get(path, values = {}) {
  return (await call(`${path}?${query(values)}`)).json();
}

export async function act(values) {
  const headers = { "Content-Type": "application/json" };
  return (await (await call("act", { method: "POST", headers, body: JSON.stringify(values) })).json()).said;
}

export async function download(path, values, name) {
  const file = await (await call(`${path}?${query(values)}`, { timeout_ms: 600000 })).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
