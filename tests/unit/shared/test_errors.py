"""The error tree: every leaf has a status, a type and a code that clients know."""

from __future__ import annotations

import pytest

from shared import errors
from shared.errors import InvalidRequestError, RopewayError

ALL = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RopewayError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_complete(kind: type[RopewayError]) -> None:
    error = kind("message", param="p", retry_after=2.0)
    assert (error.message, str(error), error.param, error.retry_after) == ("message", "message", "p", 2.0)
    assert 400 <= error.status < 600 and error.type.endswith("_error")
    assert kind("m").param is None and kind("m").error_code == kind.code
    assert kind("m", code="own").error_code == "own"
    assert kind.__name__ in (errors.__doc__ or ""), "the tree in the module's docstring has every class"


def test_an_invalid_request_is_a_value_error_too() -> None:
    assert issubclass(InvalidRequestError, ValueError)
