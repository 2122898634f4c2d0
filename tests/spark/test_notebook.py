"""The quickstart notebook runs from a clean kernel.

``WRITE_NOTEBOOK=1`` writes the outputs of the run into the notebook, for readers who do not run it.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.spark.jvm import starting

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(notebook: nbformat.NotebookNode) -> str:
    """Return the text that the cells print."""
    return "".join(output.get("text", "") for output in outputs(notebook))


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove colours, and text that depends on the environment, such as warnings and versions."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text" in output:
                    output.text = re.sub(r"\x1b\[[0-9;]*m|[ \r]+$", "", output.text, flags=re.M)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def test_the_quickstart_runs_and_every_reading_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the environment were not activated: its commands are not on the PATH.
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if ".venv" not in folder]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with ExitStack() as lock:

        def before(cell: nbformat.NotebookNode, cell_index: int) -> None:
            if "getOrCreate" in cell.source:
                lock.enter_context(starting())

        def after(**_: Any) -> None:
            lock.close()

        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(ROOT)}},
            on_cell_start=before,
            on_cell_executed=after,
        )
        client.execute()
    assert "6,000 readings in 102 rows" in texts(notebook)
    # The number of batches depends on the speed of this machine.
    assert re.search(r"\b[1-9][0-9]* batches", texts(notebook)), "the shell cells ran"
    kinds = [kind for output in outputs(notebook) for kind in output.get("data", {})]
    assert "image/png" in kinds
    if os.environ.get("WRITE_NOTEBOOK"):
        nbformat.write(tidy(notebook), NOTEBOOK)
