"""The clients of a process, and the modules and credentials that they need."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.stores.clients import load, service_credential


@pytest.mark.parametrize(
    ("module", "scheme", "extra"),
    [("google.no_such", "gs", "gcs"), ("azure.no_such", "az", "azure")],
)
def test_the_error_about_a_missing_module_names_the_install_command(
    module: str, scheme: str, extra: str
) -> None:
    message = rf"{scheme}:// need {module}, .*pip install '\.\[{extra}\]', else"
    with pytest.raises(InvalidInput, match=message):
        load(module)


def test_the_error_about_a_missing_azure_module_names_the_scheme_of_the_url() -> None:
    with pytest.raises(InvalidInput, match=r"stores of abfss:// need azure\.no_such"):
        load("azure.no_such", "abfss")


class Holder:
    """``dbutils.credentials``, or the module of executors."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._error = error

    def getServiceCredentialsProvider(self, name: str) -> Any:
        self.asked.append(name)
        if self._error is not None:
            raise self._error
        return SimpleNamespace(get_token=lambda *_: "token", of=self)


def on_executors(monkeypatch: pytest.MonkeyPatch, holder: Holder) -> None:
    module = ModuleType("databricks.service_credentials")
    vars(module)["getServiceCredentialsProvider"] = holder.getServiceCredentialsProvider
    monkeypatch.setitem(sys.modules, "databricks", ModuleType("databricks"))
    monkeypatch.setitem(sys.modules, "databricks.service_credentials", module)


def as_dbutils(holder: Holder) -> Any:
    return SimpleNamespace(credentials=holder)


def found(name: str = "buffer") -> Any:
    return service_credential(name, "az").of


def test_a_notebook_gets_a_service_credential_from_dbutils(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, executor = Holder(), Holder()
    on_executors(monkeypatch, executor)
    monkeypatch.setattr(sys.modules["__main__"], "dbutils", as_dbutils(notebook), raising=False)
    assert found("mine") is notebook
    assert (notebook.asked, executor.asked) == (["mine"], [])


def test_an_ipython_shell_gets_a_service_credential_from_its_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = Holder()
    shell = ModuleType("IPython")
    space = SimpleNamespace(user_ns={"dbutils": as_dbutils(notebook)})
    vars(shell)["get_ipython"] = lambda: space
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert found() is notebook


def test_an_executor_gets_a_service_credential_from_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = Holder()
    on_executors(monkeypatch, executor)
    assert found() is executor


def test_a_job_driver_gets_a_service_credential_from_the_sdk_if_the_module_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing, driver = Holder(error=RuntimeError("no TaskContext")), Holder()
    on_executors(monkeypatch, refusing)
    runtime = ModuleType("databricks.sdk.runtime")
    vars(runtime)["dbutils"] = as_dbutils(driver)
    monkeypatch.setitem(sys.modules, "databricks.sdk", ModuleType("databricks.sdk"))
    monkeypatch.setitem(sys.modules, "databricks.sdk.runtime", runtime)
    assert found() is driver
    assert refusing.asked == ["buffer"]


def test_the_error_outside_databricks_says_so() -> None:
    with pytest.raises(PermanentStorageError, match="'buffer', and only Databricks has such"):
        found()


def test_the_error_about_a_refusal_names_its_source_and_what_to_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_executors(monkeypatch, Holder(error=PermissionError("see https://u:secret@host/x")))
    with pytest.raises(PermanentStorageError) as raised:
        found()
    text = str(raised.value)
    assert "databricks.service_credentials: PermissionError" in text
    assert "ACCESS" in text
    assert "AZURE_CLIENT_ID" in text, "this cloud has another kind of credential"
    assert "secret" not in text


def test_a_service_credential_for_another_cloud_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_executors(monkeypatch, Holder())
    with pytest.raises(InvalidInput, match="is for another cloud than s3://"):
        service_credential("buffer", "s3")
