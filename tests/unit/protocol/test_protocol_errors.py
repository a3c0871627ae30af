from __future__ import annotations

from astraflow.protocol import errors
from astraflow.protocol.errors import BY_NAME, AstraFlowError, Retryable, UserError


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    assert errors.__doc__ is not None
    listed: list[tuple[str, str]] = []
    stack: list[tuple[int, str]] = [(0, "AstraFlowError")]
    for line in errors.__doc__.splitlines():
        if "── " in line:
            depth = line.index("── ")
            name = line.split("── ")[1].split()[0]
            while stack[-1][0] >= depth:
                stack.pop()
            listed.append((name, stack[-1][1]))
            stack.append((depth, name))
    assert {(kind.__name__, kind.__mro__[1].__name__) for kind in BY_NAME.values() if kind is not AstraFlowError} == set(listed)


def test_every_error_has_a_name_a_status_and_a_line_that_explains_it() -> None:
    for name, kind in BY_NAME.items():
        assert kind.__name__ == name
        assert kind.__doc__
        assert 400 <= kind.http_status < 600
        assert str(kind("one line")) == "one line"


def test_only_what_is_marked_is_retried_and_users_mistakes_are_value_errors() -> None:
    assert {name for name, kind in BY_NAME.items() if issubclass(kind, Retryable)} == {"Retryable", "Unavailable", "DeadlinePassed"}
    assert {name for name, kind in BY_NAME.items() if issubclass(kind, ValueError)} == {"UserError", "ConfigError", "UnknownName"}
    assert issubclass(UserError, AstraFlowError)
