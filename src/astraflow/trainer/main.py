"""A trainer process: build everything, run the loop, leave in order."""

from __future__ import annotations

import importlib
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import torch

from astraflow.lib.log import setup_logging
from astraflow.lib.metrics import Metrics
from astraflow.lib.tokenizer import Tokenizer
from astraflow.lib.trace import TRACE
from astraflow.lib.wire import Identity, new_identity
from astraflow.protocol.errors import AstraFlowError, AuthError, Replaced, UserError
from astraflow.trainer.backends import BACKENDS
from astraflow.trainer.backends.base import Backend
from astraflow.trainer.checkpoint import Checkpoints
from astraflow.trainer.config import TrainerProcess
from astraflow.trainer.link import DataflowLink
from astraflow.trainer.loop import EXIT_NOTHING, EXIT_TRAINED, EXIT_USER_ERROR, AstraFlowPPOTrainer
from astraflow.trainer.ranks import RankLost, Ranks
from astraflow.trainer.team import Team
from astraflow.weights.manager import WeightManager

logger = logging.getLogger(__name__)


def run(process: TrainerProcess) -> int:
    """Run one trainer until it is done. Exit codes: 0 trained or drained, 1 failed or nothing trained, 2 a mistake of the user, or
    another process trains this policy now (a supervisor that started this one again would only let the two take turns), 3 starved
    or stalled. SIGTERM and SIGINT drain: finish the step, save, notify, leave.
    """
    rank = os.environ.get("RANK", "0")
    setup_logging(f"trainer:{process.model_id}" + (f"#{rank}" if rank != "0" else ""), level=process.log_level)
    stop = threading.Event()
    restore = _drain_on_signals(stop)
    try:
        return run_until(process, stop)
    except (UserError, AuthError, Replaced) as error:
        logger.error("%s", error)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        logger.error("interrupted before the step was finished")
        return EXIT_NOTHING
    except RankLost as error:  # whoever is lost has said why, or was killed, which the launcher tells
        logger.warning("%s", error)
        return EXIT_NOTHING
    except (AstraFlowError, OSError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        return EXIT_NOTHING
    finally:
        restore()


def run_until(process: TrainerProcess, stop: threading.Event) -> int:
    """The same without signals and logging: `stop` drains; errors are raised."""
    for module in process.plugins:
        importlib.import_module(module)
    _seed(process)
    ranks = Ranks.join(process.trainer)
    identity = new_identity(process.run_id, process.token, process.tls)
    run_dir = Path(process.run_dir)
    with ranks.guarded():
        backend = build_backend(process)
    checkpoints = Checkpoints(run_dir / "checkpoints" / process.model_id, process.trainer.checkpoint, process.run_id, ranks)
    weights = WeightManager(process.model_id, process.weights, identity, run_dir)
    try:
        team = Team(backend, weights, checkpoints, ranks)
        del backend  # the team drops it when it is no longer needed
        code = lead(process, team, identity, stop) if ranks.leads else team.follow()
    finally:
        weights.close()
    ranks.close()
    return code


def lead(process: TrainerProcess, team: Team, identity: Identity, stop: threading.Event) -> int:
    """Run the loop; the other ranks follow."""
    metrics = Metrics(process.run_dir, f"trainer:{process.model_id}")
    if process.trace:
        TRACE.open(process.run_dir, f"trainer:{process.model_id}")
    link = DataflowLink(process.dataflow_url, identity, process.trainer.deadlines, stop.is_set)
    try:
        code = AstraFlowPPOTrainer(process, team, link, metrics, stop, _tokenizer_hashes(process)).run()
        if code == EXIT_TRAINED:
            team.forget()
            link.stay(process.model_id, team.check)
        team.end(code)
        return code
    finally:
        ended = team.weights.close()
        if ended is not None:
            metrics.log(0, {"weights/sender_exit_code": float(ended)})  # for the report: the sender is this process's child
        link.close()
        metrics.close()


def build_backend(process: TrainerProcess) -> Backend:
    """The configured backend with the model loaded."""
    make = BACKENDS.resolve(process.trainer.backend)
    media = process.trainer.media_dir or str(Path(process.run_dir) / "media")
    settings = msgspec.structs.replace(process.trainer, media_dir=media)
    backend: Backend = make(settings, process.model, process.weights.dtype, process.max_new_tokens, process.weights.lora)
    return backend


def _seed(process: TrainerProcess) -> None:
    if process.trainer.threads:
        torch.set_num_threads(process.trainer.threads)
    torch.manual_seed(process.seed)
    random.seed(process.seed)
    np.random.seed(process.seed)


def _tokenizer_hashes(process: TrainerProcess) -> tuple[str, str]:
    """Hashes of tokenizer and chat template, compared with those of the rollout services; empty without a tokenizer."""
    directory = Path(process.model.tokenizer_path or process.model.path)
    if not (directory / "tokenizer.json").is_file():
        return "", ""
    tokenizer = Tokenizer.load(directory)
    return tokenizer.hash, tokenizer.template_hash


def _drain_on_signals(stop: threading.Event) -> Callable[[], None]:
    """Set `stop` on SIGTERM and SIGINT; a second signal ends the process as Python does. Returns the undo."""
    wanted = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        logger.info("%s: finishing the step, then leaving", signal.Signals(number).name)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    previous = {number: signal.signal(number, on_signal) for number in wanted}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore
