"""Programming tasks with hidden tests, in one form whatever the source:

    wall_s     what all tests together may take
    tests      [{input, output}] for whole programs, or [{args, accepted}] for calls of `function`; these two are lists as JSON text,
               because a message holds integers of 64 bits only, and tests are full of longer ones
    function   name of the function (or method of `Solution`) under test; empty for whole programs
"""

from __future__ import annotations

import base64
import io
import json
import logging
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

from astraflow.datasets.api import Options
from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.hub import Source, first, source_rows
from astraflow.datasets.rows import tasks_of
from astraflow.lib.jsonl import BadRow

logger = logging.getLogger(__name__)

LIVECODEBENCH = Source(
    "livecodebench/code_generation_lite", ("test.jsonl|test[2-{release}].jsonl",), "0fe84c3912ea0c4d4a78037083943e8f0c4dd505"
)
DEEPCODER = Source("agentica-org/DeepCoder-Preview-Dataset", ("{subset}/{split}-*.parquet", "{subset}*.jsonl", "{subset}*.json"))
HUMAN_EVAL = Source("openai/openai_humaneval", ("*test-*.parquet", "HumanEval.jsonl.gz", "*HumanEval*.jsonl"))
WALL_S = 50.0
"""What all tests of a problem may take; the reward's own 8 s would fail right programs. `raas.rewards.deadline_s` must be longer."""
MAX_TEST_BYTES = 1 << 30
"""Of one problem, unpacked: a small archive must not fill the memory."""
WHOLE = "{question}\n\nRead from standard input and write the answer to standard output. Put the program into one ```python block."
STARTED = "{question}\n\nComplete this code and put all of it into one ```python block:\n```python\n{starter}\n```"
COMPLETE = "Complete this function and put all of it into one ```python block:\n```python\n{starter}\n```"


def human_eval(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """HumanEval: `starter_code` (imports, helpers, signature and docstring), `test` and `entry_point` as its reward wants them."""
    options = Options(config)
    split = options.take("split", "test", ("test",))
    options.done()
    yield from tasks_of(source_rows(config, HUMAN_EVAL, split=split), _human_eval_task)


def _human_eval_task(where: str, row: dict[str, Any]) -> dict[str, Any]:
    starter, test, name = (first(row, (column,), where) for column in ("prompt", "test", "entry_point"))
    for value in (starter, test, name):
        if not isinstance(value, str):
            raise BadRow(f"{where}: prompt, test and entry_point: expected text, got {type(value).__name__}")
    return {"prompt": COMPLETE.format(starter=starter.strip()), "starter_code": starter, "test": test, "entry_point": name}


def livecodebench(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """LiveCodeBench, public and private tests. Options: `release` (1 … 6: its files up to this one), `start_date` and `end_date`
    (of the contest, `2024-08-01`, both included; empty = all), `max_tests` (0 = all, its default), `wall_s`."""
    options = Options(config)
    split = options.take("split", "test", ("test",))
    release = options.take("release", 6, (1, 2, 3, 4, 5, 6))
    start, end = options.take("start_date", ""), options.take("end_date", "")
    count, wall_s = options.take("max_tests", 0), options.take("wall_s", WALL_S)
    options.done()

    def task(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
        date = str(row.get("contest_date", ""))[:10]
        if (start and date < start) or (end and date > end):
            return None
        tests = [*_listed(first(row, ("public_test_cases",), where), where), *_private(row.get("private_test_cases") or "[]", where)]
        name = str(_object(row.get("metadata") or "{}", "metadata", where).get("func_name") or "")
        return _task(first(row, ("question_content",), where), row.get("starter_code") or "", tests, name, count, wall_s, where)

    yield from tasks_of(source_rows(config, LIVECODEBENCH, split=split, release=str(release)), task)


def deepcoder(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """DeepCoder. Options: `subset` (primeintellect, taco, lcbv5, codeforces), `split` (train, test), `max_tests` (15, as
    its authors trained; 0 = all), `wall_s`. Problems without a test are left out, counted and logged."""
    options = Options(config)
    subset = options.take("subset", "primeintellect", ("primeintellect", "taco", "lcbv5", "codeforces"))
    split = options.take("split", "train", ("train", "test"))
    count, wall_s = options.take("max_tests", 15), options.take("wall_s", WALL_S)
    options.done()
    untested = 0

    def task(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal untested
        tests = _json(first(row, ("tests",), where), where)
        if isinstance(tests, dict):  # TACO keeps columns
            name = str(tests.get("fn_name") or "")
            columns = [_listed(tests.get(column) or [], where) for column in ("inputs", "outputs")]
            tests = [{"input": i, "output": o} for i, o in zip(*columns, strict=False)]
        else:
            tests = _listed(tests, where)
            head = _object(tests[0], "a test", where) if tests else {}
            name = str(head.get("fn_name") or _object(head.get("metadata") or {}, "metadata", where).get("func_name") or "")
        if not tests:
            untested += 1
            return None
        return _task(first(row, ("problem",), where), row.get("starter_code") or "", tests, name, count, wall_s, where)

    yield from tasks_of(source_rows(config, DEEPCODER, split=split, subset=subset), task)
    if untested:
        logger.warning("dataset %s: %d problems have no test and were left out", config.name or config.loader, untested)


def _task(question: str, starter: str, tests: list[Any], name: str, count: int, wall_s: float, where: str) -> dict[str, Any]:
    """`count` > 0 keeps the tests with the longest inputs, in their order."""
    if not tests:
        raise BadRow(f"{where}: no tests")
    made = [_call(test, where) if name else _run(test, where) for test in tests]
    if count > 0:
        by_size = sorted(range(len(made)), key=lambda index: -len(made[index].get("input", made[index].get("args", ""))))
        made = [made[index] for index in sorted(by_size[:count])]
    prompt = STARTED.format(question=question, starter=starter.strip()) if starter.strip() else WHOLE.format(question=question)
    return {"prompt": prompt, "tests": made, "function": name, "wall_s": wall_s}


def _run(test: Any, where: str) -> dict[str, Any]:
    return {"input": _lines(_field(test, "input", where)), "output": _lines(_field(test, "output", where))}


def _lines(value: Any) -> str:
    """TACO writes some texts as lists of lines."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _call(test: Any, where: str) -> dict[str, Any]:
    """LiveCodeBench: one JSON value per line, and one as the output. TACO and PrimeIntellect: lists, the output often in one more."""
    given, wanted = _field(test, "input", where), _field(test, "output", where)
    if isinstance(wanted, str) and isinstance(given, str):
        lines = [line for line in given.split("\n") if line.strip()]
        for text in (*lines, wanted):
            _json(text, where, parse_int=len)  # of any length: only that it is JSON matters here
        return {"args": f"[{','.join(lines)}]", "accepted": f"[{wanted}]"}
    args = [_json(line, where) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    inner = [wanted[0]] if isinstance(wanted, list) and len(wanted) == 1 else []
    return {"args": json.dumps(args if isinstance(args, list) else [args]), "accepted": json.dumps([wanted, *inner])}


def _field(test: Any, name: str, where: str) -> Any:
    if not isinstance(test, dict) or name not in test:
        raise BadRow(f"{where}: a test without `{name}`")
    return test[name]


def _json(text: Any, where: str, **options: Any) -> Any:
    try:
        return json.loads(text, **options) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where}: {text[:60]!r} is no JSON: {error}") from None


def _object(value: Any, name: str, where: str) -> dict[str, Any]:
    found = _json(value, where)
    if not isinstance(found, dict):
        raise BadRow(f"{where}: {name}: expected an object, got {found!r:.60}")
    return found


def _listed(text: Any, where: str) -> list[Any]:
    found = _json(text, where)
    if not isinstance(found, list):
        raise BadRow(f"{where}: expected a list of tests, got {type(found).__name__}")
    return found


class _TextOnly(pickle.Unpickler):
    """Reads a pickled string: a pickle that names anything to import or call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it wants something persistent")


def _private(text: str, where: str) -> list[Any]:
    """The source writes JSON, or base64(zlib(pickle(JSON text)))."""
    if text.lstrip().startswith("["):
        return _listed(text, where)
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TEST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"more than {MAX_TEST_BYTES} bytes")
        found = _TextOnly(io.BytesIO(packed)).load()
    except Exception as error:  # the boundary to an archive and a pickle of any origin, which raise whatever they like
        raise BadRow(f"{where}: private tests cannot be read: {error}") from None
    if not isinstance(found, str):
        raise BadRow(f"{where}: private tests are a pickled {type(found).__name__}, expected text")
    return _listed(found, where)
