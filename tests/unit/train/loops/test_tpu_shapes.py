"""What TPUs require, as far as a machine without one can show it."""

import numpy as np

from tests.support.measured import measured


def test_every_shape_that_an_update_sees_or_makes_is_static():
    found = measured("shapes")["shapes"]
    assert [[4, 12, 12, 1], [4], [4], [], []] == found["given"][:5]  # features, labels, weights, step, replica
    assert {"[4, 12, 12, 1]", "[4]", "[]"} == {str(shape) for shape in found["given"]}
    assert found["made"] > 100
    assert [] == found["dynamic"]
    assert np.isfinite(found["losses"]).all()


def test_every_shape_that_an_evaluation_is_fed_is_static():
    """Also in the last batch, which is padded."""
    shapes = measured("shapes")["shapes"]["evaluation"]
    assert {"[5, 12, 12, 1]", "[5]"} == {str(shape) for shape in shapes}


def test_an_update_can_be_compiled_whole_by_xla():
    """Forward, backward, Adam and the counters."""
    found = measured("shapes")["compiled"]
    np.testing.assert_allclose(found["xla"], found["plain"], rtol=1e-4)
    assert found["xla"][-1] < found["xla"][0]
    assert (3, 3) == (found["plain iterations"], found["xla iterations"])


def test_a_tpus_model_computes_in_bfloat16_and_keeps_the_rest_in_float32():
    found = measured("shapes")["bfloat16"]
    assert ["bfloat16", "float32"] == found["computes"]  # float32: the logits
    assert ["float32"] == found["variables"]
    assert ["float32", "int64"] == found["optimizer"]
    assert "float32" == found["logits"]
    assert np.isfinite(found["losses"]).all()
    assert "float32" == found["elsewhere"]


def test_a_machine_without_a_tpu_is_reported_at_once():
    found = measured("shapes")["no_tpu"]
    assert "PrerequisiteError" == found["error"]
    assert found["words"].startswith("no TPU answers (")
    assert found["words"].endswith("; set TPU_NAME to one that does")
    assert 1 == len(found["words"].splitlines())
    assert found["seconds"] < 10
