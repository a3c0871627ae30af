// Which view is shown, and who asks the server when. One timer at a time; a hidden tab does not ask.

import { NeedsToken, setToken, takeToken } from "./api.js";
import { fill, h } from "./dom.js";
import { showCharts } from "./charts.js";
import { showLive } from "./live.js";
import { showRollouts } from "./rollouts.js";
import { showGroup, showRollout } from "./trajectory.js";

const VIEWS = { live: showLive, charts: showCharts, rollouts: showRollouts, rollout: showRollout, group: showGroup };
const content = document.getElementById("content");
const state = document.getElementById("state");
let view = null; // {every_ms, look}
let turn = 0;
let timer = 0;

function say(text, bad = false) {
  if (state.textContent !== text) state.textContent = text;
  state.classList.toggle("bad", bad);
}

function askForToken(message) {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const form = h("form", { class: "login", onsubmit: (event) => { event.preventDefault(); setToken(field.value.trim()); route(); } },
    h("h2", {}, "Token"),
    h("p", {}, message),
    h("label", { for: "token" }, "The token of this run (the file token in its directory)"), field,
    h("button", { type: "submit" }, "Show"));
  fill(content, form);
  field.focus();
}

async function look(mine) {
  clearTimeout(timer);
  const shown = view;
  try {
    if (!document.hidden) await shown.look();
  } catch (error) {
    if (mine !== turn) return;
    if (error instanceof NeedsToken) { askForToken(error.message); return; }
    say(error.message, true);
  }
  if (mine === turn && shown.every_ms) timer = setTimeout(() => look(mine), shown.every_ms);
}

function route() {
  const [name, rest] = location.hash.slice(1).split("?");
  if (name === "content") return; // the skip link
  const chosen = VIEWS[name] ? name : "live";
  turn += 1;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.hash === `#${chosen}` || (link.hash === "#rollouts" && (chosen === "rollout" || chosen === "group"));
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const root = h("div", { class: `view-${chosen}` });
  fill(content, root);
  view = VIEWS[chosen](root, new URLSearchParams(rest || ""), { say, title: (text) => {
    document.getElementById("title").textContent = text;
    document.title = text;
  } });
  look(turn);
}

takeToken();
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => { if (!document.hidden && view?.every_ms) look(turn); });
route();
