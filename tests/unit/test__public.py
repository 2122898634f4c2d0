"""Public names of a package: listed once, loaded when first used, also out of a zip archive."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import opendata_buffer
from opendata_buffer._public import attach


@pytest.mark.parametrize("package", ["", ".queue", ".commit", ".producer", ".consumer"])
def test_every_name_of_the_stub_is_loaded_from_its_module(package: str) -> None:
    getter, names, public = attach("opendata_buffer" + package)
    assert public
    for name in public:
        assert getter(name).__name__ == name
    assert set(public) <= set(names())


def test_an_unknown_name_is_an_attribute_error_that_names_package_and_name() -> None:
    getter, _, _ = attach("opendata_buffer.queue")
    with pytest.raises(AttributeError, match=r"'opendata_buffer\.queue' has no attribute 'Qeue'"):
        getter("Qeue")


def test_names_are_found_when_the_package_lies_in_a_zip_archive(tmp_path: Path) -> None:
    root = Path(opendata_buffer.__file__).parent
    archive = tmp_path / "library.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in [*root.rglob("*.py"), *root.rglob("*.pyi")]:
            target.write(path, path.relative_to(root.parent))
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); import opendata_buffer;"
        "from opendata_buffer import Fenced; print(opendata_buffer.__file__, Fenced.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(archive))
    assert done.stdout.endswith("Fenced\n")
