"""What a tenant may, from its terms and the settings."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.policies import Policies, Policy
from shared.access import check_terms
from shared.errors import InvalidRequestError, PermissionDeniedError
from shared.jobs import QueuedLimits, RateLimits
from shared.tenant_terms import MAX_WEIGHT, NO_LIMIT, TenantTerms


async def policy(**terms: Any) -> Policy:
    async def find(tenant: str) -> TenantTerms:
        return TenantTerms(name=tenant, **terms)

    return await Policies(find, RateLimits(10, 1000), QueuedLimits(5, None)).of("t")


async def test_what_is_not_said_is_as_in_the_settings() -> None:
    assert await policy() == Policy(RateLimits(10, 1000), QueuedLimits(5, None))
    given = await policy(requests=3, tokens=NO_LIMIT, queued_jobs=NO_LIMIT, queued_tokens=70, weight=2.5)
    assert given == Policy(RateLimits(3, None), QueuedLimits(None, 70), weight=2.5)


@pytest.mark.parametrize(
    ("models", "asked", "allowed"),
    [
        (None, "anything", True),
        ([], "anything", False),
        (["a"], "a", True),
        (["a"], "ab", False),
        (["a"], "A", False),
        (["team/*", "b"], "team/x", True),
        (["team/*", "b"], "team", False),
        (["team/*", "b"], "b", True),
        (["*"], "anything", True),
        (["a*b"], "axb", False),
    ],
)
async def test_models(models: list[str] | None, asked: str, allowed: bool) -> None:
    mine = await policy(models=models)
    assert mine.allows(asked) == allowed
    if not allowed:
        with pytest.raises(PermissionDeniedError) as caught:
            mine.check_model(asked)
        assert (caught.value.param, caught.value.error_code) == ("model", "model_not_allowed")


@pytest.mark.parametrize(
    ("highest", "asked", "given"),
    [
        ("high", "high", "high"),
        ("high", "batch", "batch"),
        ("normal", "normal", "normal"),
        ("normal", "batch", "batch"),
        ("normal", "high", None),
        ("batch", "normal", "batch"),
        ("batch", "batch", "batch"),
        ("batch", "high", None),
    ],
)
async def test_classes(highest: Any, asked: Any, given: str | None) -> None:
    mine = await policy(max_class=highest)
    if given is not None:
        assert mine.class_of(asked, "class") == given
        return
    with pytest.raises(PermissionDeniedError, match=highest) as caught:
        mine.class_of(asked, "class")
    assert (caught.value.param, caught.value.error_code) == ("class", "class_not_allowed")


@pytest.mark.parametrize(
    ("terms", "param"),
    [
        ({"requests": 0}, "requests"),
        ({"tokens": -2}, "tokens"),
        ({"queued_jobs": 2**60}, "queued_jobs"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": MAX_WEIGHT * 2}, "weight"),
        ({"models": [""]}, "models"),
        ({"models": ["with space"]}, "models"),
        ({"models": ["a"] * 2000}, "models"),
    ],
)
def test_terms_out_of_bounds_are_refused_by_name(terms: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_terms(TenantTerms(name="t", **terms))
    assert caught.value.param == param
