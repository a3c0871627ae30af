"""What may be imported where: torch-free rooms stay free of torch, in a fresh interpreter and for every one of their modules."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import astraflow

TORCH_FREE = (
    "astraflow",
    "astraflow.protocol",
    "astraflow.lib",
    "astraflow.config",
    "astraflow.dataflow",
    "astraflow.dataflow.service",
    "astraflow.raas",
    "astraflow.raas.service",
    "astraflow.launch",
    "astraflow.datasets",
    "astraflow.rewards",
    "astraflow.workflows",
    "astraflow.cli",
)
HEAVY = ("torch", "transformers", "vllm", "sglang", "ray", "tensorflow")
LOAD = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
ROOT = Path(astraflow.__file__).parent


def loaded_by(module: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOAD, module], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of(package: str) -> list[str]:
    """The package and all modules below it, except engines that run in a child process of their own."""
    directory = ROOT / package
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in sorted(directory.rglob("*.py"))]
    return [name.removesuffix(".__init__") for name in names if ".engines.embedded" not in name]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_torch_free_room_loads_no_torch(module: str) -> None:
    assert importlib.util.find_spec(module) is not None, f"{module} does not exist"
    assert loaded_by(module).isdisjoint(HEAVY)


@pytest.mark.parametrize("package", ["protocol", "lib", "config", "dataflow", "raas", "launch", "datasets", "rewards", "workflows"])
def test_no_module_of_a_torch_free_room_loads_torch(package: str) -> None:
    """Lazily loaded modules too: a registry names them, so that importing the room says nothing about them."""
    program = (
        "import importlib, json, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program, *modules_of(package)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])).isdisjoint(HEAVY)


def test_importing_the_package_is_quick_and_loads_next_to_nothing() -> None:
    program = "import time; start = time.perf_counter(); import astraflow; print(time.perf_counter() - start)"
    argv = [sys.executable, "-c", program]
    seconds = (float(subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True).stdout) for _ in range(20))
    assert any(value < 0.5 for value in seconds), "the best of many, because the machine is shared"
    assert loaded_by("astraflow").isdisjoint({"numpy", "httpx", "starlette", "uvicorn", "tokenizers"})


def test_nothing_of_ours_stands_below_the_protocol() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, pkgutil, importlib, astraflow.protocol as p\n"
            "for m in pkgutil.iter_modules(p.__path__):\n    importlib.import_module('astraflow.protocol.' + m.name)\n"
            "print(*sorted(n for n in sys.modules if n.startswith('astraflow.') and not n.startswith('astraflow.protocol')))",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == ""
