"""Runs what the pages say, each thing in a fork of one interpreter that has the command line loaded: 0.1 s instead of one second.

Read from standard input: a JSON list of {"kind": run | check | python | layer, "words" or "text", "paths"}; written to standard output:
a JSON list of {"code", "output"}, in the same order. `check` parses a command and its configuration as the command line does, no more.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import typer.main

from astraflow import cli
from astraflow.config.check import typed
from astraflow.config.experiment import Experiment, load_experiment, spread_trainer
from astraflow.config.load import load_layers
from astraflow.launch import names
from astraflow.protocol.errors import ConfigError

DEADLINE_S = 100.0
NOT_HERE = ("no such directory; expected an HF directory", "launch.tls.cert: 'node.pem': No such file")
"""Models and certificates that only a cluster has."""


def check(words: list[str]) -> None:
    """The verb, its options and their types, and the keys and names of its configuration."""
    group: Any = typer.main.get_command(cli.app)
    verb, *rest = words
    assert verb in group.commands, f"{verb!r} is no verb"
    context = group.commands[verb].make_context(verb, rest)
    if "recipe" in context.params:
        files, overrides = cli.split_arguments(context.params["recipe"])
        try:
            names.check_names(load_experiment(files, overrides))
        except ConfigError as error:
            if not any(text in str(error) for text in NOT_HERE):
                raise


def layer(text: str) -> None:
    """The keys and types of a piece of an experiment."""
    with tempfile.TemporaryDirectory() as directory:
        base, path = Path(directory) / "base.yaml", Path(directory) / "block.yaml"
        base.write_text("experiment: {name: x}\nmodels: {default: {path: assets/tiny/solver}}\ntrain_dataset: {loader: addition}\n")
        path.write_text(text)
        layers = load_layers([base, path])
        spread_trainer(layers)
        typed(layers, Experiment, spread="trainer")


def carry_out(job: dict[str, Any]) -> int:
    sys.path[:0] = job.get("paths", [])
    try:
        if job["kind"] == "run":
            sys.argv = ["astraflow", *job["words"]]
            cli.main()
        elif job["kind"] == "check":
            check(job["words"])
        elif job["kind"] == "layer":
            layer(job["text"])
        else:
            sys.argv = job["words"]
            runpy.run_path(job["words"][0], run_name=job["name"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def one(job: dict[str, Any]) -> dict[str, Any]:
    """In a fork, with everything that it prints."""
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            code = carry_out(job)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        end = time.monotonic() + DEADLINE_S
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"code": -1, "output": f"it did not end within {DEADLINE_S:g} s"}
            time.sleep(0.01)
        output.seek(0)
        return {"code": os.waitstatus_to_exitcode(found[1]), "output": output.read().decode("utf-8", "replace")}


if __name__ == "__main__":
    check(["config", "recipes/quickstart.yaml"])  # imports what all of them import, once for all forks
    answers = [one(job) for job in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)
