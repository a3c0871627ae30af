// What /status says, and the operators' buttons.

import { act, get } from "./api.js";
import { bytes, fill, h, number, seconds, section, table } from "./dom.js";

function receipt(serving) {
  const held = Object.entries(serving || {});
  return held.map(([model, receipt]) => h("div", {}, `${model} v${receipt.version}${receipt.timeline ? ` (timeline ${receipt.timeline})` : ""} `,
    h("code", { title: receipt.digest || "unverified" }, receipt.digest ? receipt.digest.slice(0, 8) : "unverified")));
}

function load(info) {
  const used = info.total_slots - info.free_slots;
  return h("span", { class: "load" },
    h("meter", { min: 0, max: Math.max(info.total_slots, 1), value: Math.max(used, 0), "aria-label": `places used on ${info.instance_id}` }),
    ` ${info.in_flight} in flight, ${info.free_slots} of ${info.total_slots} free`);
}

function instances(seen, button) {
  const rows = seen.status.instances.map((info) => {
    const own = seen.instances[info.instance_id];
    const engines = Object.entries(own?.engines || {}).map(([model, engine]) =>
      h("div", {}, `${model}: ${engine.kind} ${engine.state}${engine.restarts ? `, ${engine.restarts} restarts` : ""}`));
    const can = seen.live && (info.state === "live" || info.state === "catching_up" || info.state === "suspect");
    return [
      h("strong", {}, info.instance_id), h("span", { class: `state ${info.state}`, title: info.reason }, info.state), info.region || "–", load(info),
      receipt(info.serving), `${seconds(info.last_seen_s)} ago${info.failures ? `, ${info.failures} failed` : ""}`, engines.length ? engines : "–",
      own ? String(own.availability.outbox) : "–", info.url,
      can ? button("Drain", `drain ${info.instance_id}`, { action: "drain", instance: info.instance_id },
        `Drain ${info.instance_id}? It finishes what runs and then leaves.`) : "",
    ];
  });
  return table("Instances", ["instance", "state", "region", "load", "receipt", "heartbeat", "engines", "outbox", "address", ""], rows, "no rollout service yet");
}

function checkpoint(one) {
  const held = one.checkpoint_version < 0 ? "none" : one.checkpoint_version;
  return one.checkpoint_wanted < 0 ? held : `${held}, asked for ${one.checkpoint_wanted}`;
}

function trainers(seen, button) {
  return table("Trainers", ["policy", "state", "region", "version", "timeline", "checkpoint", "heard of", "digest", ""], seen.status.trainers.map((one) => [
    h("strong", {}, one.model_id), h("span", { class: `state ${one.state}` }, one.state), one.region || "–", one.version, one.timeline,
    checkpoint(one), `${seconds(one.last_seen_s)} ago`, h("code", { title: one.digest }, one.digest.slice(0, 8) || "–"),
    seen.live && (one.state === "live" || one.state === "late")
      ? button("Checkpoint now", `checkpoint ${one.model_id}`, { action: "checkpoint", model: one.model_id }) : "",
  ]));
}

function queues(status) {
  return table("Queues", ["policy", "groups", "trajectories", "held", "replay", "served"], Object.entries(status.queues).map(([model, queue]) =>
    [h("strong", {}, model), queue.fresh_groups, queue.fresh_trajectories, queue.held_groups, queue.replay_groups, queue.served]));
}

function waits(status) {
  return table("Who waits for whom", ["who", "waits for", "why", "since", "deadline in"], status.waits.map((edge) => [
    edge.who, edge.waits_for, edge.why, seconds(edge.since_s), edge.deadline_s === null ? "none" : seconds(edge.deadline_s),
  ]), "nobody waits");
}

function transfers(seen) {
  return table("Weight transfers", ["instance", "policy", "serves", "size", "pull", "load", "speed"], seen.transfers.map((one) => [
    one.instance, one.model, one.version === null ? "–" : `v${one.version}`, bytes(one.size_bytes), seconds(one.pull_s), seconds(one.load_s),
    one.bytes_per_s === null ? "–" : `${bytes(one.bytes_per_s)}/s`,
  ]), "no weights were transferred yet");
}

function books(counts) {
  if (!counts) return h("p", { class: "quiet" }, "no ledger");
  const flying = Object.values(counts.in_flight).reduce((sum, value) => sum + value, 0);
  const dropped = Object.values(counts.dropped).reduce((sum, value) => sum + value, 0);
  const sum = counts.trained + dropped + flying === counts.made;
  return h("p", { class: "books" }, `made ${number(counts.made)} = trained ${number(counts.trained)} + dropped ${number(dropped)}`
    + ` + in flight ${number(flying)}  (${sum ? "adds up" : "DOES NOT ADD UP"})`);
}

function reasons(counts) {
  return table("Dropped by reason", ["reason", "trajectories"], Object.entries(counts?.dropped || {}).map(([reason, rows]) =>
    [h("a", { href: `#rollouts?${new URLSearchParams({ reason })}` }, reason), number(rows)]), "nothing was dropped");
}

function drops(seen) {
  return table("Recent drops", ["task", "policy", "reason", "why"], seen.drops.slice().reverse().map((drop) =>
    [h("a", { href: `#group?${new URLSearchParams({ lease: drop.lease_id })}` }, drop.task_id), drop.policy, drop.reason, drop.why]), "none lately");
}

function evals(seen) {
  return table("Evaluations", ["set", "versions", "results", "missing", "note"], seen.evals.slice(-10).reverse().map((one) => [
    one.dataset, Object.entries(one.versions).map(([model, held]) => `${model} v${held.version}`).join(", "),
    Object.entries(one.metrics).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${number(value)}`).join("  "), one.missing, one.note,
  ]), "none yet");
}

function facts(status) {
  const cells = [
    ["state", status.state], ["service version", status.service_version], ["up", seconds(status.uptime_s)],
    ["trajectories/s", number(status.rates.trajectories_per_s)], ["tokens/s", number(status.rates.tokens_per_s)],
    ["tasks drawn", number(status.tasks_drawn)], ["epoch", status.epoch], ["nothing moved for", seconds(status.idle_s)],
  ];
  return h("dl", { class: "facts" }, cells.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { "data-fact": name }, value))));
}

export function showLive(root, parameters, page) {
  const buttons = h("div", { class: "buttons", role: "group", "aria-label": "Operate" });
  const said = h("p", { role: "status", class: "said" });
  const body = h("div");
  root.append(buttons, said, body);

  async function press(values, question) {
    if (question && !confirm(question)) return;
    try {
      said.textContent = await act(values);
      await view.look();
    } catch (error) {
      said.textContent = error.message;
    }
  }
  const button = (label, key, values, question) =>
    h("button", { type: "button", "data-key": key, onclick: () => press(values, question) }, label);

  const view = {
    every_ms: 2000,
    async look() {
      const seen = await get("live");
      const { status } = seen;
      page.title(status?.run_id || "AstraFlow");
      page.say(seen.live ? (status.message || (status.paused ? "acquisition is paused" : "running")) : seen.note, !seen.live);
      fill(buttons, ...(seen.live ? [
        status.paused ? button("Resume acquisition", "pause", { action: "resume" }) : button("Pause acquisition", "pause", { action: "pause" }),
        button("Evaluate now", "eval", { action: "eval" }),
        button("Save Dataflow's state", "save", { action: "save" }),
      ] : []));
      const counts = section("Rollouts", books(seen.counts), reasons(seen.counts));
      if (!status) { fill(body, counts); return; }
      fill(body,
        facts(status),
        section("Instances", instances(seen, button)),
        h("div", { class: "pair" }, section("Trainers", trainers(seen, button)), section("Queues", queues(status))),
        section("Who waits for whom", waits(status)),
        section("Weight transfers", transfers(seen)),
        h("div", { class: "pair" }, counts, section("Evaluations", evals(seen))),
        section("Recent drops", drops(seen)),
        section("Events", h("ol", { class: "events", tabindex: 0, "aria-label": "Events", "data-key": "events" },
          seen.events.slice().reverse().map((text) => h("li", {}, text)))));
    },
  };
  return view;
}
