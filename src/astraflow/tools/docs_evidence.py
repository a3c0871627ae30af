"""docs/recipes.md from recipes/*.yaml, docs/evidence.md from evidence/*.json: what each recipe is, and what was measured.

Both pages link out of docs/ (`../evidence/x.json`); the site turns these links to copies (scripts/site_files.py).
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from astraflow.config.check import typed
from astraflow.config.experiment import Experiment, spread_trainer
from astraflow.config.load import load_layers

ROOT = Path(__file__).parents[3]
K = 20
"""Steps at each end of a curve that are compared."""
RECIPES = """# Recipes

A recipe is one YAML file; variants are overrides, and a file that is a layer comes behind the recipe that it changes:
`astraflow run recipes/math.yaml recipes/math-cpu.yaml`. Files and overrides are merged from left to right. Where no result stands, none was
measured: those recipes are checked to be valid, and their laptop layers take two steps in `make test-full`.
"""
EVIDENCE = """# Evidence

What was measured, each with its command, commit and machine. Measure again: `make evidence ARGS=JOB`, or the command itself. Nothing that
does not stand here is claimed. A commit with a `+` had changes that were not committed.
"""
LAYER_OF = re.compile(r"^# A layer over (\S+\.yaml)")
COMMAND = re.compile(r"^#\s+(?:make \w+\s+or\s+)?(astraflow run .*?)(?:\s{4,}\S.*)?$", re.MULTILINE)


def recipes_page() -> str:
    """What each recipe trains, on what, what it needs, and what it reached."""
    out = [RECIPES]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*.yaml"), key=_order)}
    kept = dict(evidence())
    for path, text in texts.items():
        out += [f"## {path.stem}\n", *_recipe(path, text, kept)]
    return "\n".join(out).rstrip() + "\n"


def evidence_page() -> str:
    """Every file of evidence/, with commit, machine and command."""
    out = [EVIDENCE]
    jobs = {name: found for name, found in evidence() if "report" in found}
    out += ["## Runs\n", "| run | before → after | reward, first → last steps | seconds | claims |", "|---|---|---|---|---|"]
    for name, job in jobs.items():
        out.append(f"| [{name}](#{name}) | {_accuracy(job)} | {_reward(job)} | {job['report']['wall_s']:.0f} | {_shown(job)} |")
    out.append(f"\nRewards are means over {K} steps at either end, or half of a shorter run.\n\n## Each of them\n")
    for name, found in evidence():
        out += [f"### {name}\n", _origin(name, found), ""]
        out += _run(name, found) if "report" in found else _other(found)
    return "\n".join(out).rstrip() + "\n"


def evidence() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of each file, those of `make evidence` first."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "evidence").glob("*.json"))}
    yield from sorted(found.items(), key=lambda item: ("bench" in item[1], item[0]))


# --- recipes ------------------------------------------------------------------------------------------------------------


def _recipe(path: Path, text: str, kept: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    comment = re.match(r"(?:#.*\n)+", text)
    about, *_ = re.split(r"\n#\s+(?:astraflow|make) ", comment.group() if comment else "", maxsplit=1)
    yield " ".join(line.lstrip("# ") for line in about.splitlines()) + "\n"
    layer = LAYER_OF.match(text)
    yield from _table(path, "math.yaml" if path.stem == "math-efficient-data" else layer.group(1) if layer else "")
    commands = [command.strip() for command in COMMAND.findall(text)]
    if commands:
        yield "\n".join(["```text", *commands, "```\n"])
    runs = {name: found for name, found in kept.items() if f"recipes/{path.name}" in found.get("command", "")}
    for name, found in runs.items():
        line = f"held-out accuracy {_accuracy(found)}; reward {_reward(found)}; {found['report']['wall_s']:.0f} s"
        yield f"- [{name}](evidence.md#{name}): {line} ([numbers](../evidence/{name}.json))"
    yield f"{'' if not runs else chr(10)}The file: [{path.name}](../recipes/{path.name}).\n"


def _order(path: Path) -> tuple[str, bool]:
    return path.stem.removesuffix("-cpu"), path.stem.endswith("-cpu")  # a layer behind its recipe


def _table(path: Path, under: str) -> Iterator[str]:
    files = [path.parent / under, path] if under else [path]
    layers = load_layers(files)
    spread_trainer(layers)
    found = typed(layers, Experiment, spread="trainer")  # not resolved: the large models are on a cluster only
    policy, trainer = next(iter(found.trainer.items()))
    engine, workflow = found.raas.engine_of(policy), found.workflow
    yield "| | |\n|---|---|"
    yield f"| policies | {', '.join(f'`{name}`: {model.path}' for name, model in found.models.items())} |"
    data = found.train_dataset.path or found.train_dataset.loader
    valid = ", ".join(f"{name} ({config.path or config.loader})" for name, config in found.valid_datasets.items())
    yield f"| data | {data}; evaluated on {valid or 'nothing'} |"
    yield f"| workflow, reward | `{workflow.workflow}`, `{workflow.reward}`, {workflow.n_samples} samples of at most " + (
        f"{workflow.generation.get('max_new_tokens', found.raas.generation.max_new_tokens)} tokens |"
    )
    steps = f"{trainer.max_steps} steps of {trainer.train_batch_size} trajectories"
    yield f"| algorithm | `{trainer.algorithm.advantage}`, `{trainer.algorithm.loss}`; {steps} |"
    needs = "GPUs, as its first lines say" if engine.device == "cuda" else "a CPU"
    yield f"| needs | {needs}; engine `{engine.kind}`, backend `{trainer.backend}`, {found.launch.raas} rollout services |\n"


# --- evidence -----------------------------------------------------------------------------------------------------------


def _origin(name: str, found: Mapping[str, Any]) -> str:
    machine, bench = found["machine"], found.get("bench")
    command = found.get("command") or f"astraflow bench {bench}"
    commit = found.get("commit") or machine["commit"]
    date = f", {found['date']}" if "date" in found else ""
    where = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
    named = commit[:12] + ("+" if commit.endswith("+") else "")
    return f"`{command}`, commit `{named}`{date}, on {where}: [{name}.json](../evidence/{name}.json)"


def _run(name: str, job: Mapping[str, Any]) -> Iterator[str]:
    report = job["report"]
    rollouts = report["rollouts"]
    yield f"- made {rollouts['made']} = trained {rollouts['trained']} + dropped {rollouts['dropped']} + in flight {rollouts['in_flight']}"
    yield f"- held-out accuracy by version: {_curve(job)}"
    stale = {policy: ", ".join(f"{gap}: {count}" for gap, count in gaps.items()) for policy, gaps in report["staleness"].items()}
    yield "- versions behind: trained trajectories — " + "; ".join(f"{policy} {text}" for policy, text in stale.items())
    for claim, holds in job["shows"].items():
        yield f"- {'yes' if holds else '**no**'}: {claim}"
    yield f"\n![the curves of {name}](../evidence/{name}.png)\n"


def _other(found: Mapping[str, Any]) -> Iterator[str]:
    for claim, holds in found.get("shows", {}).items():
        yield f"- {'yes' if holds else '**no**'}: {claim}"
    if "results" in found:
        yield "\n| number | value |\n|---|---|"
        yield from (f"| `{name}` | {_number(value)} |" for name, value in found["results"].items())
    elif "cells" in found:
        yield "\n| loss | versions behind | last reward | mean reward | clipped | effective samples |\n|---|---|---|---|---|---|"
        for cell in found["cells"]:
            numbers = " | ".join(f"{mean:.3f} ± {half:.3f}" for mean, half in (cell[key] for key in ("reward", "area", "clipped", "ess")))
            yield f"| {cell['loss']} | {cell['lag']} | {numbers} |"
        yield "\nMeans over seeds with 95 % confidence intervals."
    else:
        yield f"{len(found.get('runs', []))} runs; the table stands in [data algorithms](data-algorithms.md#measured)."
    yield ""


def _accuracy(job: Mapping[str, Any]) -> str:
    curves = {name: curve["values"] for name, curve in job["report"]["accuracy"].items() if curve["values"]}
    return "; ".join(f"{name} {values[0]:.2f} → {values[-1]:.2f}" for name, values in curves.items()) or "–"


def _curve(job: Mapping[str, Any]) -> str:
    curves = job["report"]["accuracy"]
    points = {name: zip(curve["steps"], curve["values"], strict=True) for name, curve in curves.items()}
    return "; ".join(f"{name} " + ", ".join(f"v{step} {value:.2f}" for step, value in row) for name, row in points.items()) or "–"


def _reward(job: Mapping[str, Any]) -> str:
    def ends(values: list[float]) -> str:
        k = max(1, min(K, len(values) // 2))
        return f"{statistics.mean(values[:k]):.2f} → {statistics.mean(values[-k:]):.2f}"

    return "; ".join(f"{policy} {ends(curve['values'])}" for policy, curve in sorted(job["report"]["reward"].items()) if curve["values"])


def _shown(job: Mapping[str, Any]) -> str:
    claims = job["shows"]
    return f"{sum(claims.values())} of {len(claims)} hold"


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
