"""Exceptions of user code as text."""

from __future__ import annotations

from hetpipe.model.user_errors import raised_text


def _raised(error: BaseException, *causes: BaseException) -> BaseException:
    """`error`, raised from the first of `causes`, which was raised from the next."""
    for outer, inner in zip((error, *causes), causes, strict=False):
        outer.__cause__ = inner
    return error


def test_an_exception_is_its_type_and_text() -> None:
    assert raised_text(ValueError("no image")) == "ValueError: no image"
    assert raised_text(KeyError()) == "KeyError"


def test_the_root_cause_of_a_lazy_import_is_named() -> None:
    error = _raised(ModuleNotFoundError("no GPT2"), ImportError("no loss"), RuntimeError("no operator"))
    assert raised_text(error) == "ModuleNotFoundError: no GPT2, caused by RuntimeError: no operator"


def test_an_error_while_another_one_is_handled_is_not_its_consequence() -> None:
    error = ValueError("no image")
    error.__context__ = KeyError("cache")
    assert raised_text(error) == "ValueError: no image"
