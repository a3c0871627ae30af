from __future__ import annotations

import pytest

from astraflow.lib.options import Options
from astraflow.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "limits", "says"),
    [
        (0, {"least": 1}, "0, expected at least 1"),
        (9, {"least": 1, "most": 8}, "9, expected at least 1 and at most 8"),
        (0.0, {"above": 0}, "0.0, expected more than 0"),
        (float("nan"), {}, "nan, expected a finite number"),
        (float("inf"), {"above": 0}, "inf, expected a finite number"),
        (None, {"least": 1}, "null"),
        (True, {"least": 1}, "bool"),
    ],
    ids=range(7),
)
def test_a_number_out_of_its_range_names_option_value_and_range(value, limits, says):
    default = 1.0 if isinstance(value, float) else 1
    with pytest.raises(ConfigError) as caught:
        Options("workflow 'w'", {"n": value}).take("n", default, **limits)
    assert str(caught.value).startswith("workflow 'w' options.n: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_both_ends_of_a_range_are_inside_and_whole_numbers_are_numbers():
    options = Options("w", {"a": 1, "b": 8, "c": 1})
    assert (options.take("a", 3, least=1, most=8), options.take("b", 3, least=1, most=8), options.take("c", 0.5, most=1)) == (1, 8, 1.0)
    assert isinstance(Options("w", {"c": 1}).take("c", 0.5), float)


NOT_ONE = "is no regular expression"


@pytest.mark.parametrize(("text", "says"), [("(", NOT_ONE), ("a", "has no group"), ("(?P<1>a)", NOT_ONE)])
def test_a_regular_expression_that_cannot_be_used_names_the_option(text, says):
    with pytest.raises(ConfigError, match=r"^w options\.p: ") as caught:
        Options("w", {"p": text}).pattern("p", "(x)", group=True)
    assert says in str(caught.value)
    assert Options("w", {"p": ""}).pattern("p", "(x)", group=True).pattern == ""
