"""No module reads data in a way that could run code: a static look at every call and import of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "astraflow"
LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
ALLOWED = {
    "dataflow/compat.py": {"pickle", "cloudpickle"},  # the old wire, behind --allow-pickle
    "datasets/code.py": {"pickle"},  # an Unpickler that refuses every name: only plain text comes out of it
    "lib/sandbox/box.py": {"marshal"},  # writes only; what it writes is read inside the sandbox
    "lib/sandbox/runner.py": {"marshal"},  # runs inside the sandbox, where the program itself is worse than any message
}
OBJECT_COLLECTIVES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"}
"""Of torch.distributed: they pickle."""


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def _unsafe(call: ast.Call, name: str) -> str:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    owner, _, function = name.rpartition(".")
    if owner == "torch" and function == "load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if given.get("allow_pickle", "False") != "False":
        return "allow_pickle"
    if given.get("trust_remote_code", "False") != "False":
        return "trust_remote_code"
    if owner == "yaml" and function in ("unsafe_load", "full_load", "load_all", "unsafe_load_all"):
        return f"yaml.{function}"
    if owner == "yaml" and function == "load" and given.get("Loader") not in ("SafeLoader", "yaml.SafeLoader", "CoreLoader"):
        return "yaml.load with another loader than a safe one"
    if function in OBJECT_COLLECTIVES:
        return function
    if owner == "marshal" and function in ("load", "loads"):
        return "marshal"
    return ""


def test_nothing_of_the_package_unpickles_or_runs_what_it_reads() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    found = []
    for path in files:
        name = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        allowed = ALLOWED.get(name, set())
        found += [f"{name}: imports {module}" for module in set(_imports(tree)) & LOADERS - allowed]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (problem := _unsafe(node, ast.unparse(node.func))):
                found.append(f"{name}:{node.lineno}: {problem}")
    allowed_calls = {"lib/sandbox/runner.py", "dataflow/compat.py"}
    assert [line for line in found if line.partition(":")[0] not in allowed_calls] == []


def test_the_yaml_loader_of_configurations_is_a_safe_one_and_the_unpickler_of_data_sets_knows_no_name() -> None:
    import io
    import pickle

    import yaml

    from astraflow.config.load import CoreLoader
    from astraflow.datasets import code

    assert issubclass(CoreLoader, yaml.SafeLoader)
    for bomb in (pickle.dumps(print), pickle.dumps(Path("x")), b"cos\nsystem\n(S'true'\ntR."):
        try:
            code._TextOnly(io.BytesIO(bomb)).load()
        except pickle.UnpicklingError:
            continue
        raise AssertionError(bomb)
