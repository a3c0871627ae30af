"""The command line: verbs only. Everything heavy is imported inside the verb that needs it.

Exit status: 0 it worked (a run: it trained, or was drained in order); 1 it failed; 2 a mistake of the user, told in one line;
3 the run stalled (its report says who is stuck).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astraflow.lib.log import ERROR_MARK
from astraflow.protocol.errors import AstraFlowError, ConfigError, ProtocolError, Refused, Retryable, UserError

if TYPE_CHECKING:
    from astraflow.config.experiment import Resolved

MISTAKES = (UserError, Refused, ProtocolError)
"""What starting again would not cure: exit status 2."""

USAGE_ERROR: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Typer's own mistakes on the command line; the class has no public name."""


def examples(*commands: str) -> str:
    """What a verb's --help ends with: commands, one a line."""
    return "\n\n".join(["Examples:", *(f"astraflow {command}" for command in commands)])


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="AstraFlow trains language-model agents with reinforcement learning.",
)

Recipe = Annotated[list[str], typer.Argument(metavar="RECIPE.yaml [key=value …]", help="YAML files left to right, then overrides.")]
ConfigFile = Annotated[str, typer.Option("--config", metavar="FILE", help="The run's configuration, e.g. runs/NAME/config.yaml.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Let peers of the seed's pickle wire take part. Unpickling can be code execution.")
]
TlsCert = Annotated[str, typer.Option("--tls-cert", metavar="FILE", help="Certificate (PEM) to show; empty = plain HTTP.")]
TlsKey = Annotated[str, typer.Option("--tls-key", metavar="FILE", help="Its key; empty = in the same file.")]
TlsCa = Annotated[str, typer.Option("--tls-ca", metavar="FILE", help="Authorities (PEM) to trust; empty = the system's.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override; may be repeated.")]


@app.command(
    epilog=examples(
        "run recipes/quickstart.yaml",
        "run recipes/math.yaml recipes/math-cpu.yaml trainer.max_steps=3 experiment.name=try",
        "run recipes/quickstart.yaml --resume",
    )
)
def run(
    recipe: Recipe,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of this name.")] = False,
    chaos: Annotated[str, typer.Option("--chaos", metavar="FAULTS", help="A drill, e.g. kill=raas:0.02,drop=pull:0.05")] = "",
    allow_pickle: AllowPickle = False,
) -> None:
    """Start every process of an experiment on this machine, show it, and report at the end."""
    from astraflow.config.experiment import load_experiment
    from astraflow.config.processes import cluster_token, dataflow_url
    from astraflow.launch import drill, drill_report
    from astraflow.launch.drill_spec import check, parse
    from astraflow.launch.local import Interrupts, LocalRun
    from astraflow.launch.names import check_names
    from astraflow.launch.plan import RunBook, plan
    from astraflow.launch.preflight import preflight
    from astraflow.launch.rundir import CONFIG, run_directory
    from astraflow.launch.track import tracking
    from astraflow.launch.watch import Watch
    from astraflow.lib.wire import new_identity
    from astraflow.tools import report
    from astraflow.tools.smollm2 import local_models

    files, overrides = split_arguments(recipe)
    faults = parse(chaos) if chaos else None
    try:
        resolved = load_experiment(files, overrides)
        check_names(resolved)
        if faults is not None:
            check(faults, resolved.experiment.launch)
        preflight(resolved, local_models(resolved.experiment.models))  # fetched once, so that the processes need not wait for each other
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was started")
        raise typer.Exit from None
    with Interrupts() as interrupts, run_directory(resolved, resume=resume) as run_dir:
        experiment = resolved.experiment
        if allow_pickle:
            from astraflow.dataflow.compat import WARNING

            typer.echo(f"WARNING: {WARNING}", err=True)
        options = ("--allow-pickle",) if allow_pickle else ()
        specs = plan(experiment, str(run_dir / CONFIG), sys.executable, os.cpu_count() or 1, options)
        driller = drill.driller(faults, specs, experiment, drill_report.prepare(run_dir)) if faults is not None else None
        book = RunBook(specs, experiment.launch)
        identity = new_identity(experiment.experiment.run_id, cluster_token(experiment), experiment.launch.tls)
        watch = Watch(dataflow_url(experiment), identity, run_dir, experiment.launch.poll_s)
        with tracking(experiment, run_dir, lambda text: typer.echo(text, err=True)), panel_of(resolved) as panel:
            processes = specs if driller is None else driller.faulty(specs)
            outcome = LocalRun(processes, book, watch, run_dir, lambda *seen: panel.show(view(*seen)), interrupts, driller).run()
            interrupts.wait_for_report(lambda: typer.echo("the run has ended; its report is being written; Ctrl-C again ends that"))
        if outcome.failure and outcome.exit_code == 2:
            say_error(outcome.failure)
        elif not report.started(run_dir) and outcome.failure:
            say_error(dead_on_arrival(outcome.failure, outcome.processes, run_dir))
        else:
            report.write(run_dir)
        passed = driller is None or drill_report.write(run_dir, typer.echo)
    raise typer.Exit(outcome.exit_code or (0 if passed else 1))


@app.command(epilog=examples("dataflow --config runs/quickstart/config.yaml"))
def dataflow(config: ConfigFile, overrides: Overrides = None, allow_pickle: AllowPickle = False) -> None:
    """Start the Dataflow process alone."""
    from astraflow.config.processes import cluster_token, dataflow_process

    resolved = process_config([config], overrides)
    from astraflow.dashboard.serve import mounted
    from astraflow.dataflow.service import run as run_service

    process = dataflow_process(resolved, cluster_token(resolved.experiment))
    process.allow_pickle = allow_pickle
    raise typer.Exit(run_service(process, mounted(process)))


@app.command(
    epilog=examples(
        "raas --config runs/quickstart/config.yaml --index 1",
        "raas --join http://127.0.0.1:8900 --name guest --set raas.slots=16",
    )
)
def raas(
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="The run's configuration; not with --join.")] = "",
    index: Annotated[int, typer.Option("--index", min=0, help="Number of this instance.")] = 0,
    join: Annotated[str, typer.Option("--join", metavar="URL", help="Dataflow of a running job; the configuration comes from it.")] = "",
    name: Annotated[str, typer.Option("--name", help="Instance id with --join; empty = a new one.")] = "",
    host: Annotated[str, typer.Option("--host", help="Address to bind to with --join.")] = "127.0.0.1",
    token_file: Annotated[str, typer.Option("--token-file", help="File with the cluster token.")] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
    plugins: Annotated[list[str] | None, typer.Option("--plugin", help="Module to import first; may be repeated.")] = None,
    overrides: Overrides = None,
) -> None:
    """Start one rollout service; with --join it adds itself to a running job."""
    from astraflow.config.processes import cluster_token, raas_process

    if bool(config) == bool(join):
        raise ConfigError("raas: give either --config FILE or --join URL")
    if join:
        from astraflow.launch.join import join_process
        from astraflow.lib.tls import Tls

        tls = Tls(cert=tls_cert, key=tls_key, ca=tls_ca)
        process = join_process(
            join, name=name, host=host, token_file=token_file, tls=tls, plugins=plugins or [], overrides=overrides or []
        )
    else:
        resolved = process_config([config], overrides)
        process = raas_process(resolved, index, cluster_token(resolved.experiment, token_file))
    from astraflow.raas.service import run as run_service
    from astraflow.tools.smollm2 import local_models

    process.models = local_models(process.models)
    raise typer.Exit(run_service(process))


@app.command(epilog=examples("trainer --config runs/quickstart/config.yaml --policy default"))
def trainer(
    config: ConfigFile,
    policy: Annotated[str, typer.Option("--policy", help="Policy to train; empty = the only one.")] = "",
    overrides: Overrides = None,
) -> None:
    """Start one trainer (all its ranks, unless torchrun or the like starts them) and its sender agent."""
    from astraflow.config.processes import cluster_token, trainer_process
    from astraflow.launch.preflight import check_model
    from astraflow.tools.smollm2 import local_models

    resolved = process_config([config], overrides)
    if not policy and len(resolved.policies) > 1:
        raise ConfigError(f"--policy: expected one of {', '.join(resolved.policies)}")
    process = trainer_process(resolved, policy or resolved.policies[0], cluster_token(resolved.experiment))
    process.model = local_models({process.model_id: process.model})[process.model_id]
    check_model(f"models.{process.model_id}", process.model)
    if process.trainer.ranks > 1 and "WORLD_SIZE" not in os.environ:
        from astraflow.launch.ranks import run_ranks

        code, problem = run_ranks([sys.executable, "-m", "astraflow", *sys.argv[1:]], process.trainer.ranks)
        if problem:
            say_error(problem)
        raise typer.Exit(code)
    from astraflow.trainer.main import run as run_service

    raise typer.Exit(run_service(process))


@app.command(epilog=examples("status runs/quickstart", "status http://127.0.0.1:8900 --json"))
def status(
    target: Annotated[str, typer.Argument(metavar="URL|RUN_DIR", help="Dataflow's address, or the directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="The whole answer as JSON.")] = False,
    token_file: Annotated[str, typer.Option("--token-file", help="File with the cluster token.")] = "",
    tls_ca: TlsCa = "",
) -> None:
    """What a running job does, and who waits for whom."""
    from astraflow.launch.join import dataflow_status, steps_planned
    from astraflow.protocol.codec import encode_json
    from astraflow.tools.panel import print_status

    answer = dataflow_status(target, token_file, tls_ca)
    if as_json:
        typer.echo(encode_json(answer).decode())
        return
    print_status(answer, steps_planned(target, token_file, tls_ca))


@app.command("view", epilog=examples("view runs/quickstart --port 8080"))
def view_run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, also of one that goes on.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 = any that is free.")] = 0,
    token_file: Annotated[str, typer.Option("--token-file", help="File with the cluster token; without it RUN_DIR/token.")] = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Serve the dashboard and the rollout viewer of a run."""
    from astraflow.dashboard.serve import view as serve
    from astraflow.lib.tls import Tls

    serve(run_dir, port, token_file, typer.echo, Tls(cert=tls_cert, key=tls_key, ca=tls_ca))


@app.command(epilog=examples("track runs/quickstart"))
def track(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, also of one that goes on.")],
    follow: Annotated[bool, typer.Option("--follow", help="Until a signal, instead of to the present end.")] = False,
) -> None:
    """Send the numbers of a run to its trackers, from where they stopped.

    `astraflow run` does it by itself; this is for what it could not send, and for processes that were started one by one.
    """
    from astraflow.launch.track import track as feed

    raise typer.Exit(feed(process_config([str(run_dir / "config.yaml")], None), follow))


@app.command(epilog=examples("trace runs/quickstart --step 3 --out step3.json"))
def trace(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run with experiment.trace=true; it may go on.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the trace is written.")] = Path("trace.json"),
    step: Annotated[int | None, typer.Option("--step", min=1, help="Only what made this version.")] = None,
    trajectory: Annotated[str, typer.Option("--trajectory", metavar="LEASE[/INDEX]", help="Only the life of this one.")] = "",
) -> None:
    """A Chrome trace (ui.perfetto.dev) of a run over all its processes."""
    from astraflow.tools.trace import write

    typer.echo(write(run_dir, out, step, trajectory))


@app.command(epilog=examples("explain runs/quickstart --reason filter --limit 5"))
def explain(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, also of one that goes on.")],
    task: Annotated[str, typer.Option("--task", help="Only groups of this task.")] = "",
    lease: Annotated[str, typer.Option("--lease", help="Only this lease.")] = "",
    reason: Annotated[str, typer.Option("--reason", help="Only this reason, or those that begin with it (error, error:reward).")] = "",
    policy: Annotated[str, typer.Option("--policy", help="Only for this policy.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="Groups to show, newest first.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="The whole answer as JSON.")] = False,
) -> None:
    """Why groups were not trained on: one reason each, and counts that add up."""
    import msgspec

    from astraflow.tools.explain import Query, show
    from astraflow.tools.explain import explain as look
    from astraflow.tools.panel import page

    answer = look(run_dir, Query(task=task, lease=lease, reason=reason, policy=policy, limit=limit))
    if as_json:
        typer.echo(msgspec.json.encode(answer).decode())
        return
    show(answer, page())


@app.command(epilog=examples("config recipes/quickstart.yaml trainer.max_steps=3"))
def config(recipe: Recipe) -> None:
    """Print the resolved experiment and where every value comes from."""
    from astraflow.config.show import annotated
    from astraflow.launch.preflight import check_without_fetching

    resolved = process_config(*split_arguments(recipe))
    check_without_fetching(resolved.experiment)
    typer.echo(annotated(resolved), nl=False)


@app.command(epilog=examples("doctor recipes/quickstart.yaml --json doctor.json"))
def doctor(
    recipe: Recipe,
    sender: Annotated[str, typer.Option("--sender", metavar="URL", help="A running sender agent: measure the way to it.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the lines there as well.")] = None,
) -> None:
    """What would go wrong on this machine with this configuration; ends with 1 when something would."""
    import json

    from astraflow.launch.preflight import preflight
    from astraflow.tools import doctor as tool
    from astraflow.tools.smollm2 import local_models

    files, overrides = split_arguments(recipe)
    resolved = process_config(files, overrides)
    models, lines = local_models(resolved.experiment.models), []
    for line in tool.examine(resolved, models, lambda: preflight(resolved, models), sender):
        lines.append(line)
        typer.echo(str(line))
    if json_file is not None:
        json_file.write_text(json.dumps(tool.as_json(lines), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    raise typer.Exit(tool.exit_code(lines))


@app.command("list", epilog=examples("list workflows", "list policies"))
def list_names(family: Annotated[str, typer.Argument(help="workflows, rewards, datasets, environments, engines, backends …")]) -> None:
    """Print the known names of a family, one a line."""
    from astraflow.launch.names import names

    typer.echo("".join(f"{name}\n" for name in names(family)), nl=False)


@app.command(epilog=examples("chaos --seed 7 --trace", "chaos --count 100"))
def chaos(
    seed: Annotated[int, typer.Option("--seed", min=0, help="The schedule to replay.")] = 0,
    count: Annotated[int, typer.Option("--count", min=1, help="So many schedules, from --seed on.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event.")] = False,
) -> None:
    """Replay fault schedules against the real Dataflow service in simulated time; ends with 1 when an invariant breaks."""
    from astraflow.tools.chaos import tell

    raise typer.Exit(tell(seed, count, trace, typer.echo))


@app.command(
    epilog=examples(
        "bench dataflow --json dataflow.json",
        "bench engine",
        "bench train --size quickstart",
        "bench weights --old before.npy --new after.npy",
    )
)
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to measure: dataflow, engine, train, weights.")],
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write machine and results there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, to see that it works; the numbers mean nothing.")] = False,
    old: Annotated[Path | None, typer.Option("--old", metavar="NPY", help="weights: 16-bit words before a step, to measure …")] = None,
    new: Annotated[Path | None, typer.Option("--new", metavar="NPY", help="… and after it, instead of traces made here.")] = None,
    peer: Annotated[Path | None, typer.Option("--peer", metavar="PYTHON", help="train: an interpreter with TRL.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="NAME", help="train: quickstart or long, instead of both.")] = None,
) -> None:
    """Measure this machine."""
    from rich.console import Console

    from astraflow.tools import bench as benches

    options = {key: value for key, value in (("old", old), ("new", new), ("peer", peer), ("size", size)) if value is not None}
    benches.run(name, json_file, quick, Console(), **options)


@app.command(
    epilog=examples(
        "conformance dataflow http://127.0.0.1:8900 --json dataflow.json",
        "conformance raas http://127.0.0.1:8901 --model assets/tiny/solver",
        "conformance trainer http://127.0.0.1:8900 --config recipes/tiny-sort.yaml",
    )
)
def conformance(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="What is tested: dataflow, raas, trainer.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Its address; trainer: where the tool plays the Dataflow that it attaches to.")],
    token_file: Annotated[str, typer.Option("--token-file", help="File with the cluster token.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address for what the tool plays; the service calls it.")] = "127.0.0.1",
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="trainer: the recipe that /config answers.")] = "",
    model: Annotated[str, typer.Option("--model", metavar="DIR", help="raas: directory of the Hugging Face model that it serves.")] = "",
    workflow: Annotated[str, typer.Option("--workflow", help="raas: a workflow that it knows.")] = "rlvr",
    reward: Annotated[str, typer.Option("--reward", help="raas: a reward that it knows.")] = "exact_match",
    batch_size: Annotated[int, typer.Option("--batch-size", min=0, help="dataflow: trajectories; 0 = what /config says.")] = 0,
) -> None:
    """Test a service in any language against the contract, over the wire alone; ends with 1 when a check fails.

    The service must be there for the test alone, e.g. `astraflow dataflow --config runs/NAME/config.yaml`.
    """
    from astraflow.tools import conformance as tool
    from astraflow.tools.conformance_suites import make

    settings = {"config": config, "model": model, "workflow": workflow, "reward": reward, "batch_size": batch_size}
    suite = make(service, url, token_file, host, settings)
    raise typer.Exit(0 if tool.run(suite, service, url, typer.echo, json_file) else 1)


@app.command(epilog=examples("replay runs/quickstart --filter filter_zero_adv --curator '{name: greso, p_easy: .4}'"))
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run; it may still be running.")],
    curators: Annotated[list[str] | None, typer.Option("--curator", metavar="YAML", help="Name, or '{name: greso, p_easy: .4}'.")] = None,
    filters: Annotated[list[str] | None, typer.Option("--filter", metavar="YAML", help="The same; may be repeated.")] = None,
    shapers: Annotated[list[str] | None, typer.Option("--shaper", metavar="YAML", help="The same; may be repeated.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """What other data policies would have kept, on the log of a run."""
    from astraflow.tools import replay as tool

    tool.run(run_dir, curators or [], filters or [], shapers or [], json_file)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from astraflow import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line and exit. Every expected error is one line on standard error."""
    try:
        code = app(prog_name="astraflow", standalone_mode=False)
    except typer.Exit as end:
        code = end.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except AstraFlowError as error:
        say_error(str(error))
        code = 2 if isinstance(error, MISTAKES) or (isinstance(error, Retryable) and not is_service()) else 1
    except USAGE_ERROR as error:
        say_error(error.format_message())
        code = 2
    except OSError as error:  # a full disk, a directory that went away
        say_error(f"{error.filename or 'the run directory'}: {error.strerror or error}")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def is_service() -> bool:
    """Whether this process is one that a supervisor may start again (so that an absent peer is no mistake of the user)."""
    return len(sys.argv) > 1 and sys.argv[1] in ("dataflow", "raas", "trainer") and "--join" not in sys.argv


def say_error(text: str) -> None:
    """One line on standard error."""
    typer.echo(ERROR_MARK + " ".join(text.split()), err=True)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files first, then overrides: what holds `=` is an override."""
    files = [argument for argument in arguments if "=" not in argument]
    return files, [argument for argument in arguments if "=" in argument]


def process_config(files: list[str], overrides: list[str] | None) -> Resolved:
    """The configuration of one process."""
    from astraflow.config.experiment import load_experiment
    from astraflow.launch.names import check_names

    resolved = load_experiment(files, overrides or [])
    check_names(resolved)
    return resolved


def panel_of(resolved: Resolved) -> Any:
    from astraflow.config.processes import dataflow_url
    from astraflow.tools.panel import Panel

    steps = {policy: config.max_steps for policy, config in resolved.experiment.trainer.items()}
    page = f"{dataflow_url(resolved.experiment)}/dashboard/"
    return Panel(f"{resolved.experiment.experiment.name}   {resolved.run_dir}   {page}", steps)


def view(book: Any, observed: Any, age_s: float) -> Any:
    """The supervisor's knowledge in the panel's terms (the two do not know each other)."""
    from astraflow.tools.panel import ProcessRow, View

    rows = [ProcessRow(name, p.state, p.restarts, tuple(p.exit_codes)) for name, p in book.processes.items()]
    return View(
        book.phase, age_s, rows, observed.status, observed.status_age_s, observed.instances, observed.evals, book.events, observed.events
    )


def dead_on_arrival(failure: str, processes: dict[str, dict[str, Any]], run_dir: Path) -> str:
    """A run that never got going: the reason, and where the rest of it is written."""
    broken = [name for name, process in processes.items() if any(process["exit_codes"]) and process["state"] == "failed"]
    logs = ", ".join(str(run_dir / "logs" / f"{name}.log") for name in broken)
    return failure + (f" (see {logs})" if logs else "")


if __name__ == "__main__":
    main()
