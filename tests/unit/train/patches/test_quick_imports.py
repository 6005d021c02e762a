"""How TensorFlow and Keras are imported."""

import contextlib
import gc
import importlib
import sys

import pytest

from train.patches import quick_imports


@pytest.fixture
def drawing(tmp_path, monkeypatch) -> str:
    """A package as Keras would import it for nothing: it is installed, and was not imported yet."""
    (tmp_path / "drawing_for_a_test.py").write_text("pictures = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quick_imports, "DRAWING", ("drawing_for_a_test",))
    monkeypatch.delitem(sys.modules, "drawing_for_a_test", raising=False)
    return "drawing_for_a_test"


def test_drawing_packages_seem_missing_until_they_are_imported(drawing):
    with quick_imports.quick_imports(), pytest.raises(ModuleNotFoundError):
        importlib.import_module(drawing)
    imported = importlib.import_module(drawing)
    with quick_imports.quick_imports():
        assert imported is importlib.import_module(drawing)
    assert imported is sys.modules[drawing]


def test_garbage_is_looked_for_again_also_after_an_error(drawing):
    frozen = gc.get_freeze_count()
    try:
        with contextlib.suppress(ModuleNotFoundError), quick_imports.quick_imports():
            assert not gc.isenabled()
            importlib.import_module(drawing)
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    assert drawing not in sys.modules
