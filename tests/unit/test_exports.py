"""The public names: one list, complete, importable, and light to import."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opendata_buffer
from opendata_buffer import errors

pytestmark = pytest.mark.checkout

PAGES = (Path(__file__).parents[2] / "docs" / "reference").glob("api*.md")
LISTED = [
    found
    for page in PAGES
    if page.name not in ("api-admin.md", "api-tools.md")  # not names of the root
    for found in re.findall(
        r"^::: (opendata_buffer\.[\w.]+)\.(\w+)$", page.read_text("utf-8"), re.MULTILINE
    )
]
DOCUMENTED = {name: module for module, name in LISTED}
DOCUMENTED |= dict.fromkeys(errors.__all__, "opendata_buffer.errors")
PARTITIONERS = {"modulo", "rendezvous", "random"}
"""Names that are imported from their modules."""


def test_all_is_exactly_what_is_documented() -> None:
    assert set(opendata_buffer.__all__) == set(DOCUMENTED) - PARTITIONERS


def test_the_page_about_administration_has_all_of_its_names() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "api-admin.md"
    listed = re.findall(r"^::: opendata_buffer\.admin\.\w+\.(\w+)$", page.read_text(), re.MULTILINE)
    assert sorted(listed) == opendata_buffer.admin.__all__


@pytest.mark.parametrize("name", opendata_buffer.__all__)
def test_a_public_name_is_the_object_of_its_module_and_has_a_docstring(name: str) -> None:
    value = getattr(opendata_buffer, name)
    documented = getattr(importlib.import_module(DOCUMENTED[name]), name)
    if value.__module__.startswith("opendata_buffer.assembly."):
        assert value.__bases__ == (documented,)
    else:
        assert value is documented
    assert inspect.getdoc(value)


@pytest.mark.parametrize(
    "name", ["Consumer", "Producer", "Publisher", "TopicConsumer", "TopicProducer"]
)
def test_a_public_class_differs_from_its_base_only_in_its_use_of_a_broker(name: str) -> None:
    value = getattr(opendata_buffer, name)
    (below,) = value.__bases__
    assert (value.__name__, value.__doc__) == (name, below.__doc__)
    assert inspect.signature(value) == inspect.signature(below)
    defaults = {"_default_committer", "_default_pause"}
    assert len(defaults & vars(value).keys()) == 1
    added = {each for each in vars(value) if not each.startswith("__")} - defaults
    assert added <= {"_abc_impl"}


NOT_FOR_USERS = {"set_result", "set_exception", "set_running_or_notify_cancel", "check_s3_only"}
"""Names that a base class of Python has, or that other packages of the library call."""


@pytest.mark.parametrize("name", opendata_buffer.__all__)
def test_completion_offers_no_method_that_the_site_hides(name: str) -> None:
    config = (Path(__file__).parents[2] / "mkdocs.yml").read_text("utf-8")
    (hidden,) = re.findall(r'"!\^\((set_result.*)\)\$"', config)
    (others,) = re.findall(r'"!\^\((check_s3_only.*)\)\$"', config)
    names = {*hidden.split("|"), *others.split("|")} - {"of"}
    assert names == NOT_FOR_USERS
    methods = {"fetch_pooled", "within", "seal", "forget_left", "config_of", "pace"}
    assert not methods & set(dir(getattr(opendata_buffer, name)))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Prodcuer'"):
        opendata_buffer.Prodcuer  # noqa: B018


def test_dir_lists_names_that_are_not_loaded_yet() -> None:
    assert set(opendata_buffer.__all__) <= set(dir(opendata_buffer))


@pytest.mark.parametrize(
    "statement",
    ["import opendata_buffer", "import opendata_buffer.cli", "from opendata_buffer import Fenced"],
)
def test_importing_the_package_loads_no_heavy_module(statement: str) -> None:
    heavy = {"pyarrow", "boto3", "numpy", "pandas", "pyspark", "zstandard", "opentelemetry"}
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())
