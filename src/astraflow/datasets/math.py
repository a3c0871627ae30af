"""Mathematics with a known answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.datasets.api import Options
from astraflow.datasets.config import DatasetConfig
from astraflow.lib.jsonl import BadRow, read_jsonl
from astraflow.protocol.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "assets" / "gsm8k"
"""200 training and 100 test rows, in a source checkout."""


def gsm8k(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """GSM8K rows (`question`, `answer` with the result after `####`) from `path`; without one the rows of the checkout.

    Options: `split` (train, test), for a directory and for the shipped rows.
    """
    options = Options(config)
    split = options.take("split", "train", ("train", "test"))
    options.done()
    path = Path(config.path).expanduser() if config.path else SHIPPED
    path = path / f"{split}.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"dataset 'gsm8k' path: {path} does not exist; give the path of a train.jsonl or test.jsonl")
    for number, row in enumerate(read_jsonl(path), start=1):
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str) or "####" not in solution:
            raise BadRow(f"{path}: record {number}: expected `question` and `answer` with ####, found {', '.join(sorted(row))}")
        yield {"prompt": question, "answer": solution.rsplit("####", 1)[1].strip().replace(",", "")}
