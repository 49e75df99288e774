"""Optional packages: one error for all of them, which names the package and the extra that installs it."""

import pickle
import sys

import pytest

from maclaurin.errors import MissingExtraError, load_extra


def test_a_missing_package_is_named_with_its_extra_and_the_alternative(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError) as caught:
        load_extra("zstandard", "data", "reading .zst files", "use .gz")
    assert str(caught.value) == (
        "reading .zst files needs zstandard, which is not installed: "
        "pip install 'maclaurin[data]', or use .gz."
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_module_names_the_package_that_it_needs(tmp_path, monkeypatch):
    (tmp_path / "pages.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        MissingExtraError, match=r"a report needs no_such_package, .*'maclaurin\[report\]'\.$"
    ):
        load_extra("pages", "report", "a report")


def test_a_mistake_of_ours_is_not_taken_for_a_missing_package():
    with pytest.raises(ModuleNotFoundError, match=r"maclaurin\.nothing"):
        load_extra("maclaurin.nothing", "report", "a report")


def test_an_installed_package_is_returned():
    assert load_extra("json", "data", "reading") is sys.modules["json"]
