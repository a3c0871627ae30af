"""The command line: verbs only. Everything heavy is imported inside the verb that needs it.

Exit status: 0 it worked (a run: it trained, or was drained in order); 1 it failed; 2 a mistake of the user, told in one line;
3 the run stalled (its report says who is stuck).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astraflow.lib.log import ERROR_MARK
from astraflow.protocol.errors import AstraFlowError, ConfigError, ProtocolError, Refused, Retryable, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from astraflow.config.experiment import Resolved
    from astraflow.weights.config import ModelConfig

MISTAKES = (UserError, Refused, ProtocolError)
"""What starting again would not cure: exit status 2."""

USAGE_ERROR: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Typer's own mistakes on the command line; the class has no public name."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="AstraFlow trains language-model agents with reinforcement learning.",
)

Recipe = Annotated[list[str], typer.Argument(metavar="RECIPE.yaml [key=value …]", help="YAML files left to right, then overrides.")]
ConfigFile = Annotated[str, typer.Option("--config", metavar="FILE", help="The run's configuration, e.g. runs/NAME/config.yaml.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override; may be repeated.")]


@app.command()
def run(recipe: Recipe, resume: Annotated[bool, typer.Option("--resume", help="Continue the run of this name.")] = False) -> None:
    """Start every process of an experiment on this machine, show it, and report at the end."""
    import os

    from astraflow.config.experiment import load_experiment
    from astraflow.config.processes import cluster_token, dataflow_url
    from astraflow.launch.local import LocalRun
    from astraflow.launch.names import check_names
    from astraflow.launch.plan import RunBook, plan
    from astraflow.launch.preflight import preflight
    from astraflow.launch.rundir import CONFIG, run_directory
    from astraflow.launch.watch import Watch
    from astraflow.lib.wire import new_identity
    from astraflow.tools import report

    files, overrides = split_arguments(recipe)
    resolved = load_experiment(files, overrides)
    check_names(resolved)
    preflight(resolved, local_models(resolved.experiment.models))  # fetched once, so that the processes need not wait for each other
    with run_directory(resolved, resume=resume) as run_dir:
        experiment = resolved.experiment
        specs = plan(experiment, str(run_dir / CONFIG), sys.executable, cores=os.cpu_count() or 1)
        book = RunBook(specs, experiment.launch)
        identity = new_identity(experiment.experiment.run_id, cluster_token(experiment))
        watch = Watch(dataflow_url(experiment), identity, run_dir, experiment.launch.poll_s)
        with panel_of(resolved) as panel:
            outcome = LocalRun(specs, book, watch, run_dir, lambda *seen: panel.show(view(*seen))).run()
        if outcome.failure and outcome.exit_code == 2:
            say_error(outcome.failure)
        elif not report.started(run_dir) and outcome.failure:
            say_error(dead_on_arrival(outcome.failure, outcome.processes, run_dir))
        else:
            report.write(run_dir)
    raise typer.Exit(outcome.exit_code)


@app.command()
def dataflow(config: ConfigFile, overrides: Overrides = None) -> None:
    """Start the Dataflow process alone."""
    from astraflow.config.processes import cluster_token, dataflow_process

    resolved = process_config(config, overrides)
    from astraflow.dataflow.service import run as run_service

    raise typer.Exit(run_service(dataflow_process(resolved, cluster_token(resolved.experiment))))


@app.command()
def raas(
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="The run's configuration; not with --join.")] = "",
    index: Annotated[int, typer.Option("--index", min=0, help="Number of this instance.")] = 0,
    join: Annotated[str, typer.Option("--join", metavar="URL", help="Dataflow of a running job; the configuration comes from it.")] = "",
    name: Annotated[str, typer.Option("--name", help="Instance id with --join; empty = a new one.")] = "",
    host: Annotated[str, typer.Option("--host", help="Address to bind to with --join.")] = "127.0.0.1",
    token_file: Annotated[str, typer.Option("--token-file", help="File with the cluster token.")] = "",
    plugins: Annotated[list[str] | None, typer.Option("--plugin", help="Module to import first; may be repeated.")] = None,
    overrides: Overrides = None,
) -> None:
    """Start one rollout service; with --join it adds itself to a running job."""
    from astraflow.config.processes import cluster_token, raas_process

    if bool(config) == bool(join):
        raise ConfigError("raas: give either --config FILE or --join URL")
    if join:
        from astraflow.launch.join import join_process

        process = join_process(join, name=name, host=host, token_file=token_file, plugins=plugins or [], overrides=overrides or [])
    else:
        resolved = process_config(config, overrides)
        process = raas_process(resolved, index, cluster_token(resolved.experiment, token_file))
    process.models = local_models(process.models)
    from astraflow.raas.service import run as run_service

    raise typer.Exit(run_service(process))


@app.command()
def trainer(
    config: ConfigFile,
    policy: Annotated[str, typer.Option("--policy", help="Policy to train; empty = the only one.")] = "",
    overrides: Overrides = None,
) -> None:
    """Start one trainer and its sender agent."""
    from astraflow.config.processes import cluster_token, trainer_process
    from astraflow.launch.preflight import check_model

    resolved = process_config(config, overrides)
    if not policy and len(resolved.policies) > 1:
        raise ConfigError(f"--policy: expected one of {', '.join(resolved.policies)}")
    process = trainer_process(resolved, policy or resolved.policies[0], cluster_token(resolved.experiment))
    process.model = local_models({process.model_id: process.model})[process.model_id]
    check_model(f"models.{process.model_id}", process.model)
    from astraflow.trainer.main import run as run_service

    raise typer.Exit(run_service(process))


@app.command()
def status(
    target: Annotated[str, typer.Argument(metavar="URL|RUN_DIR", help="Dataflow's address, or the directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="The whole answer as JSON.")] = False,
    token_file: Annotated[str, typer.Option("--token-file", help="File with the cluster token.")] = "",
) -> None:
    """What a running job does, and who waits for whom."""
    from astraflow.launch.join import dataflow_status, steps_planned
    from astraflow.protocol.codec import encode_json
    from astraflow.tools.panel import print_status

    answer = dataflow_status(target, token_file)
    if as_json:
        typer.echo(encode_json(answer).decode())
        return
    print_status(answer, steps_planned(target, token_file))


@app.command()
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


@app.command()
def config(recipe: Recipe) -> None:
    """Print the resolved experiment and where every value comes from."""
    from astraflow.config.experiment import load_experiment
    from astraflow.config.show import annotated
    from astraflow.launch.names import check_names

    resolved = load_experiment(*split_arguments(recipe))
    check_names(resolved)
    typer.echo(annotated(resolved), nl=False)


@app.command("list")
def list_names(family: Annotated[str, typer.Argument(help="workflows, rewards, datasets, engines, backends or policies.")]) -> None:
    """Print the known names of a family, one a line."""
    from astraflow.launch.names import names

    typer.echo("".join(f"{name}\n" for name in names(family)), nl=False)


@app.command()
def chaos(
    seed: Annotated[int, typer.Option("--seed", min=0, help="The schedule to replay.")] = 0,
    count: Annotated[int, typer.Option("--count", min=1, help="So many schedules, from --seed on.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event.")] = False,
) -> None:
    """Replay fault schedules against the real Dataflow service in simulated time; ends with 1 when an invariant breaks."""
    from astraflow.tools.chaos import tell

    raise typer.Exit(tell(seed, count, trace, typer.echo))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to measure: dataflow.")],
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write machine and results there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, to see that it works; the numbers mean nothing.")] = False,
) -> None:
    """Measure this machine with real processes."""
    from rich.console import Console

    from astraflow.tools import bench as benches

    benches.run(name, json_file, quick, Console())


@app.command()
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


def process_config(file: str, overrides: list[str] | None) -> Resolved:
    """The configuration of one process."""
    from astraflow.config.experiment import load_experiment
    from astraflow.launch.names import check_names

    resolved = load_experiment([file], overrides or [])
    check_names(resolved)
    return resolved


def local_models(models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """The models with every scheme replaced by the HF directory in the cache, fetched now if need be. Raises ConfigError."""
    import msgspec

    from astraflow.tools.smollm2 import SCHEME, ensure

    found = {}
    for name, model in models.items():
        local = {field: getattr(model, field) for field in ("path", "tokenizer_path")}
        for field, path in local.items():
            if path.startswith(SCHEME):
                try:
                    local[field] = str(ensure(path))
                except UserError as error:
                    raise ConfigError(f"models.{name}.{field}: {error}") from None
        found[name] = msgspec.structs.replace(model, **local)
    return found


def panel_of(resolved: Resolved) -> Any:
    from astraflow.tools.panel import Panel

    steps = {policy: config.max_steps for policy, config in resolved.experiment.trainer.items()}
    return Panel(f"{resolved.experiment.experiment.name}   {resolved.run_dir}", steps)


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
