"""TRL's GRPOTrainer on what `astraflow bench train` and `astraflow bench e2e` measure. Needs an interpreter with TRL, nothing of AstraFlow:

    python -m venv trl && trl/bin/pip install torch==2.13.0 && trl/bin/pip install trl==1.16.0 transformers==5.24.0
    trl/bin/python bench/peer_trl.py step CASE.json OUT.json     optimizer steps on given completions and rewards, without generation
    trl/bin/python bench/peer_trl.py loop CASE.json OUT.json     the whole synchronous loop on a task
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"(?:(?<![\w.)\]])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?")
"""As AstraFlow's reward `last_number` reads numbers."""


class Clock(TrainerCallback):
    """Wall and CPU seconds of every optimizer step, without what `generating` holds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.rewards: list[float] = []
        self.stop_at: tuple[int, float] | None = None
        """(window, mean reward) that ends the run."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        self.wall.append(time.perf_counter() - self._began[0])
        self.cpu.append(time.process_time() - self._began[1])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **ignored: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])
            window, mean = self.stop_at or (0, 0.0)
            if window and len(self.rewards) >= window and sum(self.rewards[-window:]) / window >= mean:
                control.should_training_stop = True


def settings(case: dict[str, Any], directory: str) -> GRPOConfig:
    """The plainest GRPO that is the same as ours: fp32, no checkpointing, no KL, clip 0.2, token mean over the whole batch."""
    batch = case["groups"] * case["samples"]
    per_pass = case["rows_per_pass"]
    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=batch // per_pass,
        num_generations=case["samples"],
        max_completion_length=case["max_new_tokens"],
        max_steps=case["steps"],
        learning_rate=case["lr"],
        lr_scheduler_type="constant_with_warmup" if case["warmup_steps"] else "constant",
        warmup_steps=case["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=case["max_grad_norm"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=case["seed"],
    )


def model_of(case: dict[str, Any]) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(case["model"])


def step(case: dict[str, Any]) -> dict[str, Any]:
    """Steps on given rows: no generation at all happens, so that nothing has to be taken off."""
    model, tokenizer = model_of(case)

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen: dict[str, int] = defaultdict(int)
        rows = []
        for prompt in prompts:
            rows.append((int(prompt), seen[prompt]))
            seen[prompt] += 1
        return {
            "prompt_ids": [case["prompts"][group] for group, _ in rows],
            "completion_ids": [case["completions"][group][index] for group, index in rows],
            "logprobs": None,
            "given_reward": [case["rewards"][group][index] for group, index in rows],
        }

    def reward(given_reward: list[float], **ignored: Any) -> list[float]:
        return given_reward

    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(case, directory),
            train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(case["groups"])]}),
            processing_class=tokenizer,
            rollout_func=given,
            callbacks=[clock],
        )
        trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return {"step_s": clock.wall, "step_cpu_s": clock.cpu, "grad_norm": norms}


def loop(case: dict[str, Any]) -> dict[str, Any]:
    """Generation, reward and step in turn on chat prompts with numbers for answers, until the mean reward is reached."""
    model, tokenizer = model_of(case)

    def reward(completions: list[Any], answer: list[str], **ignored: Any) -> list[float]:
        scores = []
        for completion, right in zip(completions, answer, strict=True):
            text = completion[0]["content"]
            found = NUMBER.findall(text)
            scores.append(1.0 if text.strip() == right else 0.2 if found and found[-1].replace(",", "") == right else 0.0)
        return scores

    clock = Clock()
    clock.stop_at = case["stop_window"], case["stop_reward"]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(case, directory),
            train_dataset=Dataset.from_list(case["tasks"]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    return {"step_s": clock.wall, "step_cpu_s": clock.cpu, "reward": clock.rewards, "seconds": seconds}


def main(kind: str, case_file: str, out_file: str) -> int:
    """Run one case; the result holds what it ran on."""
    case = json.loads(Path(case_file).read_text(encoding="utf-8"))
    torch.set_num_threads(case["threads"])
    found = {"step": step, "loop": loop}[kind](case)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    Path(out_file).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
