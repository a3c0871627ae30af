"""Mathematics with a known answer: public data sets, whose mirrors differ in column names and in how an answer is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.datasets.api import Options
from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.hub import Source, first, source_rows
from astraflow.datasets.rows import check_chat, tasks_of
from astraflow.lib.jsonl import BadRow

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parents[3] / "assets" / "gsm8k"
"""200 training and 100 test rows, in a source checkout."""
QUESTION = ("problem", "question", "Problem", "Question", "prompt")
ANSWER = ("answer", "final_answer", "Answer", "reward_model", "solution", "Solution")
"""`solution` last: Minerva has nothing else."""


def public(config: DatasetConfig, seed: int, *, source: Source, splits: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rows of a public set as `prompt` (or `messages`, where the source has a chat) and `answer`. Options: `split`.

    Rows without an answer are left out, counted and logged.
    """
    options = Options(config)
    split = options.take("split", splits[0], splits)
    options.done()
    unanswered = 0

    def task(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal unanswered
        question = first(row, QUESTION, where)
        answer = answer_of(first(row, ANSWER, where))
        if not answer:
            unanswered += 1
            return None
        if not isinstance(question, list):
            return {"prompt": str(question), "answer": answer}
        check_chat(question, where)
        return {"messages": [{"role": turn["role"], "content": turn["content"]} for turn in question], "answer": answer}

    yield from tasks_of(source_rows(config, source, split=split), task)
    if unanswered:
        logger.warning("dataset %s: %d rows have no readable answer and were left out", config.name or config.loader, unanswered)


def answer_of(value: Any) -> str:
    """How a source writes its answer → the answer; empty when there is none.

    27.0 (AMC) is 27; a list (OlympiadBench) is its members; a structure (DAPO) holds it as `ground_truth`; behind `####` it stands
    with thousands separators (GSM8K); a whole solution (Minerva) has it in its last box.
    """
    if isinstance(value, dict):
        return answer_of(value.get("ground_truth", ""))
    if isinstance(value, list | tuple):
        return ", ".join(answer_of(part) for part in value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().replace(",", "")
    return _last_box(text) if "\\boxed{" in text else text


def _last_box(text: str) -> str:
    inner = text.rsplit("\\boxed{", 1)[1]
    depth = 1
    for position, char in enumerate(inner):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return inner[:position].strip()
    return ""


def gsm8k(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """GSM8K rows (`question`, `answer` with the result after `####`) from `path`; without one the rows of the checkout, else the hub's.

    Options: `split` (train, test).
    """
    options = Options(config)
    split = options.take("split", "train", ("train", "test"))
    options.done()
    if not config.path and SHIPPED.is_dir():
        config = DatasetConfig(loader=config.loader, path=str(SHIPPED), split=config.split, options=config.options)
    source = Source("openai/gsm8k", (f"main/{split}-*.parquet", f"{split}.jsonl"))
    yield from tasks_of(source_rows(config, source, split=split), _gsm8k_task)


def _gsm8k_task(where: str, row: dict[str, Any]) -> dict[str, Any]:
    solution = first(row, ("answer",), where)
    if "####" not in str(solution):
        raise BadRow(f"{where}: expected `question` and `answer` with ####, found {', '.join(sorted(row))}")
    return {"prompt": first(row, ("question",), where), "answer": answer_of(solution)}


def _set(source: Source, *splits: str) -> Callable[[DatasetConfig, int], Iterator[dict[str, Any]]]:
    return partial(public, source=source, splits=splits)


ANY_FILES = ("*.parquet", "*.json", "*.jsonl")
deepscaler = _set(Source("agentica-org/DeepScaleR-Preview-Dataset", ANY_FILES), "train")
dapo = _set(Source("BytedTsinghua-SIA/DAPO-Math-17k", ANY_FILES), "train")
math500 = _set(Source("HuggingFaceH4/MATH-500"), "test")
aime24 = _set(Source("math-ai/aime24"), "test")
aime25 = _set(Source("math-ai/aime25"), "test")
amc23 = _set(Source("math-ai/amc23"), "test")
amc24 = _set(Source("rawsh/2024_AMC12", ANY_FILES), "test")
minerva = _set(Source("math-ai/minervamath"), "test")
olympiadbench = _set(Source("math-ai/olympiadbench"), "test")
