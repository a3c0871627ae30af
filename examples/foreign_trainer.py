"""A trainer that is no part of AstraFlow: any process that speaks the routes may train a policy of a running job.

It calls /ready, /batch, /notify_version (at the end /shutdown); the weights library serves /get_buffer_info, /register_receiver and
/request_transfer for it. The rest is plain torch: GRPO with a clipped ratio, one AdamW step per batch on fp32 masters.

    astraflow run recipes/quickstart.yaml launch.trainers=false launch.dataflow_port=8900     # a job without a trainer of its own
    python examples/foreign_trainer.py http://127.0.0.1:8900
"""

import argparse
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from astraflow.lib.tokenizer import Tokenizer
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.batch import Batch, BatchRequest
from astraflow.protocol.codec import array
from astraflow.protocol.control import NotifyVersion, Ready, Shutdown
from astraflow.protocol.errors import Conflict, Replaced, Retryable
from astraflow.protocol.routes import DataflowAPI
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager

TRIES, POLL_S, ROWS, CLIP = 1200, 20.0, 16, 0.2


class Learner:
    """The model, its fp32 masters and the optimizer."""

    def __init__(self, path: str, lr: float):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        self.masters = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.0)
        self.round()

    def round(self) -> None:
        """The words of the next version: masters rounded to nearest even in bf16."""
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.data.copy_(master.data.to(torch.bfloat16))

    def loss(self, tokens: dict[str, torch.Tensor], advantage_B: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
        """Σ −min(rA, clip(r)A) over the own tokens of some rows [B, T], padded at their end; r = θ/behaviour."""
        logits = self.model(input_ids=tokens["input_ids"][:, :-1]).logits / temperature_B[:, None, None]
        logp = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens["input_ids"][:, 1:], reduction="none")
        ratio, advantage = torch.exp(logp - tokens["logprobs"][:, 1:]), advantage_B[:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return -torch.where(tokens["loss_mask"][:, 1:] > 0, gain, 0.0).sum()

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; straight-through: gradients of the words are applied to the masters."""
        rows = {name: torch.from_numpy(array(values).copy()) for name, values in batch.rows.items()}
        flat = {name: torch.from_numpy(array(batch.tokens[name]).copy()) for name in ("input_ids", "loss_mask", "logprobs")}
        flat["input_ids"], ends = flat["input_ids"].long(), array(batch.offsets).tolist()
        scored = rows["scored"].bool() & torch.isfinite(rows["credit"])
        spread = (rows["reward_shaped"] - rows["group_reward_mean"]) / (rows["group_reward_std"] + 1e-4)
        advantage = torch.where(scored & ~rows["reward_all_equal"].bool(), spread, 0.0).float()
        own = [int(flat["loss_mask"][a:b].sum()) if keep else 0 for a, b, keep in zip(ends, ends[1:], scored, strict=False)]
        live = [row for row, count in enumerate(own) if count and advantage[row] != 0]  # the others only stay in the denominator
        for some in (live[at : at + ROWS] for at in range(0, len(live), ROWS)):
            tokens = {k: pad_sequence([v[ends[r] : ends[r + 1]] for r in some], batch_first=True) for k, v in flat.items()}
            (self.loss(tokens, advantage[some], rows["temperature"][some]) / sum(own)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        self.round()
        return {"reward/mean": float(rows["rewards"][scored].mean()), "rollout/loss_tokens": float(sum(own))}


def call(client: SyncClient, route: Any, request: Any = None) -> Any:
    """One call, again while Dataflow is away: what is repeated is known by its name and changes nothing."""
    for _ in range(TRIES):
        try:
            return client.call(route, request, timeout_s=60.0 + POLL_S)
        except Retryable:
            time.sleep(0.5)
    raise SystemExit(f"{route.path}: no answer from Dataflow")


def train(client: SyncClient, learner: Learner, weights: WeightManager, about: dict[str, Any], steps: int) -> str:
    """Attach, step after step, and leave; returns why it ended. `about`: what every /ready says."""
    policy, version, timeline, reason = about["model_id"], 0, -1, f"{steps} steps are done"

    def publish() -> str:
        weights.offload(learner.model.named_parameters(remove_duplicate=False), version)
        return weights.published(version)  # its digest; from now on it can be pulled, so others may be told of it

    digest = publish()
    while version < steps:
        try:
            if timeline < 0:  # the first time, after a restart of Dataflow that forgot us, or on a dead timeline
                again = version if version else None
                ready = Ready(**about, sender_endpoint=weights.endpoint, version=version, digest=digest, recovered_version=again)
                timeline = call(client, DataflowAPI.ready, ready).timeline
            reply = call(client, DataflowAPI.batch, BatchRequest(model_id=policy, timeline=timeline, version=version, wait_s=POLL_S))
            if reply.kind == "batch":
                metrics, version = learner.step(reply.batch), version + 1
                digest = publish()
                notice = NotifyVersion(model_id=policy, timeline=timeline, version=version, digest=digest, metrics=metrics)
                call(client, DataflowAPI.notify_version, notice)
            elif reply.kind == "stale_timeline":
                timeline = -1
            elif reply.kind != "wait":
                reason = f"{reply.kind}: {reply.reason}"
                break
        except Conflict as refusal:
            timeline = -1
            if isinstance(refusal, Replaced):
                raise  # another process trains this policy now
    while not call(client, DataflowAPI.shutdown, Shutdown(model_id=policy, reason=reason, wait_s=POLL_S)).run_ended:
        pass  # rollout services that join later still need these weights
    return reason


def main() -> int:
    """Exit code 0 after training; settings that are not given are the job's own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("dataflow", help="address of a running job's Dataflow")
    for name in ("policy", "model", "token-file"):
        parser.add_argument(f"--{name}", default="")
    given = parser.parse_args()
    token = Path(given.token_file).read_text().strip() if given.token_file else ""
    with tempfile.TemporaryDirectory() as work_dir, SyncClient(given.dataflow, new_identity("", token)) as client:
        found = call(client, DataflowAPI.config)
        client.identity = new_identity(found.run_id, token)
        policy = given.policy or next(iter(found.config["models"]))
        settings, model = found.config["trainer"][policy], given.model or found.config["models"][policy]["path"]
        tokenizer, learner = Tokenizer.load(Path(model)), Learner(model, settings["optimizer"]["lr"])
        about = {"tokenizer_hash": tokenizer.hash, "template_hash": tokenizer.template_hash}
        about |= {"model_id": policy, "train_batch_size": settings["train_batch_size"]}
        config = msgspec.convert(found.config["weights"], WeightsConfig)
        with closing(WeightManager(policy, config, client.identity, Path(work_dir))) as weights:
            reason = train(client, learner, weights, about, settings["max_steps"])
    sys.stdout.write(f"{reason}\n")
    return 1 if reason.startswith(("starved", "stalled")) else 0


if __name__ == "__main__":
    sys.exit(main())
