// One rollout as turns and as tokens, and a group side by side.

import { get, query } from "./api.js";
import { fill, h, number, section, table } from "./dom.js";
import { fate, versions } from "./rollouts.js";

const MAX_TOKENS = 20000;
const COLD_NATS = 5; // log-probs below −5 all look the same
const FAR = 2; // so do advantages beyond two standard deviations

function plain(content) {
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("\n");
  return content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
}

function turns(record) {
  const spoken = record.turns?.length ? record.turns.map((turn) => [turn.role, turn.policy, plain(turn.content)])
    : (record.calls || []).flatMap((call) => [["prompt", call.policy, call.prompt], ["answer", call.policy, call.answer]]);
  if (!spoken.length) return h("p", { class: "quiet" }, "no turns were kept");
  return h("ol", { class: "turns" }, spoken.map(([role, policy, text]) =>
    h("li", { class: role === "assistant" || role === "answer" ? "said-by-model" : "" }, h("p", { class: "who" }, `${role ?? "?"}${policy ? ` (${policy})` : ""}`), h("pre", {}, text))));
}

// Colour by one of these: class and strength (0 … 1) of a token, or null.
const COLOURS = {
  "log-prob": (token) => ["warm", Math.min(1, -token.logprob / COLD_NATS)],
  "sampled or given": () => ["cool", 0.7],
  policy: (token, context) => [`kind${context.policies.indexOf(token.policy) % 6}`, 0.7],
  version: (token, context) => [`kind${context.versions.indexOf(token.version) % 6}`, 0.7],
  advantage: (token, context) => {
    const value = context.advantage[token.policy];
    return value === undefined ? null : [value < 0 ? "warm" : "good", Math.min(1, Math.abs(value) / FAR)];
  },
};

function tokens(record, outcomes) {
  const segments = record.segments || [];
  if (!segments.length) return h("p", { class: "quiet" }, "this record holds no tokens (the episode failed, or an earlier version of AstraFlow wrote it)");
  const runs = segments.flat().filter((run) => run.tokens);
  const context = {
    policies: [...new Set(runs.map((run) => run.policy))],
    versions: [...new Set(runs.map((run) => run.version))].sort((a, b) => a - b),
    advantage: Object.fromEntries(outcomes.filter((one) => one.advantage !== undefined).map((one) => [one.policy, one.advantage])),
  };
  const body = h("div");
  const choice = h("select", { id: "colour", onchange: () => draw() }, Object.keys(COLOURS).map((name) => h("option", { value: name }, name)));
  const legend = h("p", { class: "quiet" });

  function token(run, index) {
    const one = { policy: run.policy, version: run.version, logprob: run.logprobs[index] };
    const node = h("span", { class: "token", title: `${one.policy} v${one.version}, log-prob ${number(one.logprob)}` }, run.tokens[index]);
    const colour = COLOURS[choice.value](one, context);
    if (colour) {
      node.classList.add(colour[0]);
      node.style.setProperty("--strength", `${Math.round(colour[1] * 100)}%`);
    }
    return node;
  }

  function draw() {
    let left = MAX_TOKENS;
    fill(body, segments.map((segment, number) => h("pre", { class: "tokens", "aria-label": `segment ${number}` }, segment.map((run) => {
      if (!run.tokens) return h("span", { class: "given" }, run.text);
      const shown = run.tokens.slice(0, Math.max(left, 0)).map((_, index) => token(run, index));
      left -= run.tokens.length;
      return shown;
    }))));
    legend.textContent = {
      "log-prob": `white: certain; full colour: log-prob ${-COLD_NATS} nats or below. Given text is grey.`,
      "sampled or given": "coloured: sampled by a policy (loss mask 1); grey: given.",
      policy: context.policies.map((name) => `${name}: colour ${context.policies.indexOf(name) + 1}`).join(", "),
      version: `versions ${context.versions.join(", ")}`,
      advantage: Object.entries(context.advantage).map(([name, value]) => `${name}: ${number(value)} standard deviations from its group's mean`).join("; ")
        || "no group statistics: it is not in the ledger, or was not scored",
    }[choice.value] + (left < 0 ? ` Only the first ${MAX_TOKENS} tokens are shown.` : "");
  }

  draw();
  return h("div", {}, h("p", {}, h("label", { for: "colour" }, "Colour by "), choice), legend, body);
}

function facts(row, record) {
  const cells = [
    ["reward", number(row.reward)], ["finish", row.finish], ["tokens", number(row.tokens)], ["versions", versions(row)], ["workflow", row.workflow],
    ["task", h("a", { href: `#rollouts?${query({ task: row.task_id })}` }, row.task_id)],
    ["group", h("a", { href: `#group?${query({ lease: row.lease_id })}` }, row.lease_id)],
    ["member", row.idx], ["attempt", row.attempt], ["instance", row.instance], ["time", new Date(row.time * 1000).toLocaleString()],
  ];
  if (record?.error) cells.push(["error", `${record.error.boundary}.${record.error.kind}: ${record.error.message}`]);
  return h("dl", { class: "facts" }, cells.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function ends(outcomes) {
  return table("What became of it", ["policy", "outcome", "why", "value", "group", "advantage", "batch"], outcomes.map((one) => [
    one.policy, h("span", { class: `state ${one.state}` }, one.state + (one.reason ? ` (${one.reason})` : "")), one.why || "–", number(one.value),
    one.group_mean === undefined ? "–" : `${number(one.group_mean)} ± ${number(one.group_std)}`, number(one.advantage),
    one.batch ? `of version ${one.batch[1]}, timeline ${one.batch[0]}` : "–",
  ]), "the ledger does not know its lease: an evaluation");
}

export function showRollout(root, parameters, page) {
  return {
    every_ms: 0,
    async look() {
      const { row, record } = await get("rollout", { place: parameters.get("place") || "" });
      page.say("");
      const parts = record ? [section("Turns", turns(record)), section("Tokens", tokens(record, row.outcomes)),
        section("Task", h("pre", {}, JSON.stringify(record.data, null, 1)))] : [h("p", {}, "the record was deleted: only the newest are kept")];
      fill(root, h("h2", {}, `Rollout ${row.lease_id} / ${row.idx}`), facts(row, record), section("What became of it", ends(row.outcomes)), ...parts);
    },
  };
}

export function showGroup(root, parameters, page) {
  return {
    every_ms: 0,
    async look() {
      const found = await get("group", { lease: parameters.get("lease") || "" });
      page.say("");
      const columns = found.members.map(({ row, record }) => h("article", { "aria-label": `member ${row.idx}` },
        h("h3", {}, h("a", { href: `#rollout?${query({ place: row.place })}` }, `Member ${row.idx}`), row.attempt > 1 ? ` attempt ${row.attempt}` : ""),
        h("p", {}, `reward ${number(row.reward)}, ${number(row.tokens)} tokens, ${versions(row)}, ${row.finish}`), h("div", {}, fate(row.outcomes)),
        record ? turns(record) : h("p", {}, "deleted")));
      fill(root, h("h2", {}, `Group ${found.lease_id}`), h("p", { class: "quiet" }, found.more ? `${found.more} more members` : ""),
        h("div", { class: "side-by-side scroll", role: "region", "aria-label": "Members side by side", tabindex: 0 }, columns));
    },
  };
}
