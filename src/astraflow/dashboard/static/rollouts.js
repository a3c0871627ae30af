// The list of rollouts: search, filter, pages. The filter stands in the address, so a view can be kept or passed on.

import { download, get, query } from "./api.js";
import { fill, h, number, table } from "./dom.js";

const FIELDS = [
  ["q", "search", "Text", {}],
  ["reward_min", "number", "Reward from", { step: "any" }], ["reward_max", "number", "Reward to", { step: "any" }],
  ["tokens_min", "number", "Tokens from", { min: 0 }], ["tokens_max", "number", "Tokens to", { min: 0 }],
  ["version", "number", "Version", { min: 0 }],
  ["workflow", "select", "Workflow", {}], ["policy", "select", "Policy", {}], ["instance", "select", "Instance", {}],
  ["state", "select", "Outcome", {}], ["reason", "select", "Why not trained", {}],
  ["task", "text", "Task", {}], ["order", "select", "Order", {}],
];
const STATES = [["trained", "trained"], ["dropped", "dropped"], ["in_flight", "in flight"], ["unknown", "evaluation (not in the ledger)"]];
const ORDERS = ["newest", "oldest", "best", "worst", "longest", "shortest"];
const SIZE = 50;

export function fate(outcomes) {
  if (!outcomes.length) return h("span", { class: "quiet" }, "not in the ledger");
  return outcomes.map((one) => h("div", { title: one.why }, `${one.policy}: `, h("span", { class: `state ${one.state}` }, one.state), one.reason ? ` ${one.reason}` : ""));
}

export function versions(row) {
  if (row.min_version === null) return "–";
  return row.min_version === row.max_version ? `v${row.min_version}` : `v${row.min_version}–${row.max_version}`;
}

function cells(row) {
  return [
    h("a", { href: `#rollout?${query({ place: row.place })}` }, `${row.lease_id} / ${row.idx}`),
    row.error ? h("span", { class: "state error" }, row.error) : number(row.reward), number(row.tokens), versions(row), row.workflow, fate(row.outcomes),
    h("span", { class: "head" }, row.head),
  ];
}

function options(select, values, any) {
  const chosen = select.value || select.dataset.wanted || "";
  const known = values.map(([value]) => value);
  const all = chosen && !known.includes(chosen) ? [[chosen, chosen], ...values] : values;
  const text = JSON.stringify(all);
  if (select.dataset.options === text) return;
  select.dataset.options = text;
  select.replaceChildren(...(any ? [h("option", { value: "" }, any)] : []), ...all.map(([value, label]) => h("option", { value }, label)));
  select.value = chosen || (any ? "" : values[0][0]);
}

export function showRollouts(root, parameters, page) {
  const inputs = new Map(FIELDS.map(([name, kind, , more]) => {
    const node = kind === "select" ? h("select", { id: name, "data-wanted": parameters.get(name) || "" }) : h("input", { id: name, type: kind, ...more });
    if (kind !== "select") node.value = parameters.get(name) || "";
    return [name, node];
  }));
  let pageNumber = Number(parameters.get("page")) || 0;
  const count = h("p", { role: "status" });
  const list = h("div");
  const previous = h("button", { type: "button", onclick: () => turn(pageNumber - 1) }, "Previous");
  const next = h("button", { type: "button", onclick: () => turn(pageNumber + 1) }, "Next");
  const save = h("button", { type: "button", onclick: () => exported() }, "Export JSONL");
  const form = h("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); turn(0); }, onchange: () => turn(0) },
    FIELDS.map(([name, , label]) => h("div", {}, h("label", { for: name }, label), inputs.get(name))), h("button", { type: "submit" }, "Search"));
  root.append(form, h("div", { class: "buttons" }, previous, next, save, count), list);
  options(inputs.get("state"), STATES, "any");
  options(inputs.get("order"), ORDERS.map((order) => [order, order]), "");

  const filter = () => Object.fromEntries([...inputs].map(([name, node]) => [name, node.value || node.dataset.wanted || ""]).filter(([, value]) => value));
  let asked = 0;

  async function load() {
    const mine = (asked += 1);
    const wanted = filter();
    const found = await get("rollouts", { ...wanted, page: pageNumber, size: SIZE });
    if (mine !== asked) return;
    const { choices } = found;
    for (const [name, values] of [["workflow", choices.workflow], ["policy", choices.policies], ["instance", choices.instance], ["reason", choices.reason]]) {
      options(inputs.get(name), values.map((value) => [value, value]), "any");
      delete inputs.get(name).dataset.wanted;
    }
    delete inputs.get("state").dataset.wanted;
    delete inputs.get("order").dataset.wanted;
    const pages = Math.max(1, Math.ceil(found.total / SIZE));
    count.textContent = `${number(found.total)} rollouts, page ${pageNumber + 1} of ${pages}`;
    previous.disabled = pageNumber === 0;
    next.disabled = pageNumber + 1 >= pages;
    page.say(found.pending ? `indexing: ${number(found.pending)} records to go` : "");
    fill(list, table("Rollouts", ["rollout", "reward", "tokens", "version", "workflow", "outcome", "end of the answer"], found.rows.map(cells), "no rollout matches"));
    view.every_ms = found.pending ? 500 : 5000;
  }

  async function turn(number) {
    pageNumber = number;
    history.replaceState(null, "", `#rollouts?${query({ ...filter(), page: pageNumber || "" })}`);
    try { await load(); } catch (error) { page.say(error.message, true); }
  }

  async function exported() {
    save.disabled = true;
    try { await download("export", filter(), "rollouts.jsonl"); } catch (error) { page.say(error.message, true); }
    save.disabled = false;
  }

  const view = { every_ms: 5000, look: load };
  return view;
}
