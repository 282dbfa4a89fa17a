"""The end of `hetpipe demo`: where to look."""

from __future__ import annotations

from hetpipe.cli.start.demo import ending


def test_it_ends_with_where_to_look() -> None:
    lines = ending("digits-1", plan="examples/digits/job.yaml", has_pages=True)
    (page,) = [line for line in lines if line.startswith("  hetpipe ui ")]
    assert page.endswith(" the run in a browser: http://127.0.0.1:7480/runs/digits-1")
    assert any(line.startswith("  hetpipe plan examples/digits/job.yaml --html plan.html ") for line in lines)
    assert any(line.startswith("  hetpipe init my-job ") for line in lines)


def test_a_plan_is_named_only_where_it_can_be_made() -> None:
    assert not any("hetpipe plan" in line for line in ending("digits-1", plan=None, has_pages=True))


def test_it_says_what_the_pages_need() -> None:
    assert not any("pip install" in line for line in ending("digits-1", plan=None, has_pages=True))
    assert any("pip install 'hetpipe[ui]'" in line for line in ending("digits-1", plan=None, has_pages=False))
