"""The recipe of the conda package, made from ``pyproject.toml`` for each release.

The recipe names the source distribution by its SHA-256, so it can only be written after the build.
Its form is version 1 of conda-forge's (``recipe.yaml``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONDA_NAMES: Mapping[str, str] = {}
"""Names of dependencies that conda-forge calls differently. So far there are none."""

_RECIPE = """\
schema_version: 1

context:
  version: "{version}"
  python_min: "{python}"

package:
  name: {name}
  version: ${{{{ version }}}}

source:
  url: {repository}/releases/download/v${{{{ version }}}}/{archive}-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: python -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
{scripts}

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
{build}
  run:
    - python >=${{{{ python_min }}}}
{run}

tests:
  - python:
      imports:
        - opendata_buffer
        - buffer_source
        - buffer_sink
      python_version: ${{{{ python_min }}}}.*
      pip_check: true
  - script:
{commands}

about:
  summary: {summary}
  license: {license}
  license_file: LICENSE
  homepage: {repository}
  documentation: {documentation}
"""


def requirement(text: str) -> str:
    """Return a dependency in conda's form.

    Args:
        text: Such as ``boto3>=1.36``, without extras and markers.

    Returns:
        Such as ``boto3 >=1.36``.

    Raises:
        ValueError: The dependency has an extra or a marker, which a recipe states differently.
    """
    found = re.fullmatch(r"([A-Za-z0-9._-]+)\s*((?:[<>=!~]=?[\w.*,<>=!~]+)?)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} cannot be written into a recipe without an entry of its own")
    name = CONDA_NAMES.get(found[1], found[1])
    return f"{name} {found[2]}".strip()


def recipe(pyproject: Mapping[str, Any], sha256: str) -> str:
    """Return the recipe of a release.

    Args:
        pyproject: The content of ``pyproject.toml``.
        sha256: The digest of the source distribution, in hexadecimal digits.
    """
    project = pyproject["project"]
    scripts = project["scripts"]
    return _RECIPE.format(
        name=project["name"],
        archive=project["name"].replace("-", "_"),
        version=project["version"],
        python=project["requires-python"].removeprefix(">="),
        repository=project["urls"]["Repository"],
        documentation=project["urls"]["Documentation"],
        summary=project["description"],
        license=project["license"],
        sha256=sha256,
        scripts=_items([f"{name} = {target}" for name, target in scripts.items()], 6),
        commands=_items([f"{name} --help" for name in scripts], 6),
        build=_items([requirement(each) for each in pyproject["build-system"]["requires"]], 4),
        run=_items([requirement(each) for each in project["dependencies"]], 4),
    )


def _items(items: list[str], indent: int) -> str:
    return "\n".join(f"{' ' * indent}- {item}" for item in items)
