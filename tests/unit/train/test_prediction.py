"""What an export says of examples: in the types of its inputs, and as values where it does not classify."""

import json
import math
import runpy
from pathlib import Path
from unittest.mock import Mock

import pytest
import tensorflow as tf
from PIL import Image
from PIL.ExifTags import Base
from tensorflow import keras

from cluster.system.errors import RunFailed, UsageError
from cluster.system.json_files import write_json
from train import prediction, saved_model
from train.data.dataset_record import Leaf
from train.model import export, input_types
from train.prediction import predict, show_outputs


def test_large_whole_numbers_and_several_values_are_kept(make_run, tmp_path):
    """The model gives what its input exceeds 2**31 by, and twice that."""
    run = make_run(workers=0)
    numbers = keras.Input((1,), dtype="int64")
    outputs = keras.layers.Lambda(lambda of: tf.cast(of - 2**31, "float32") * [[1.0, 2.0]], output_shape=(2,))(numbers)
    export.export(keras.Model(numbers, outputs), run.export, (1,), None)
    file = tmp_path / "example.json"
    file.write_text(json.dumps([2**31 + 7]))
    assert [7, 14] == [float(line) for line in predict(run, None, file)]
    for wrong in ([1.5], [2**63], ["a"]):
        file.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match="^--features "):
            predict(run, None, file)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (tf.errors.ResourceExhaustedError(None, None, "a; No space left on device"), RunFailed),
        (OSError(30, "Read-only file system"), RunFailed),
        (tf.errors.ResourceExhaustedError(None, None, "OOM"), tf.errors.ResourceExhaustedError),
    ],
)
def test_an_export_that_cannot_be_written_is_one_line(make_run, tmp_path, monkeypatch, error, raised):
    monkeypatch.setattr(saved_model, "_restore", Mock(return_value=(Mock(), None, Mock(), 1)))
    monkeypatch.setattr(export, "export", Mock(side_effect=error))
    with pytest.raises(raised):
        saved_model.export(make_run(workers=0), tmp_path)


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch):
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("os._exit", exited := Mock())
    runpy.run_path(saved_model.__file__, run_name="__main__")
    exited.assert_called_once_with(130)


def test_each_export_is_the_next_version_of_a_served_model(tmp_path):
    (exported := tmp_path / "export").mkdir()
    (exported / "saved_model.pb").write_bytes(b"model")
    served = tmp_path / "models" / "fashion"
    assert 1 == export.add_version(exported, served)
    (served / "9").mkdir()
    (served / "best").mkdir()
    assert 10 == export.add_version(exported, served)
    assert {"1", "9", "10", "best"} == {path.name for path in served.iterdir()}
    assert b"model" == (served / "10" / "saved_model.pb").read_bytes()
    with pytest.raises(UsageError):
        export.add_version(exported, served / "10" / "saved_model.pb")


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "bool", "float32", "float16"])
def test_features_are_given_in_the_type_of_an_input(dtype):
    features = keras.Input((1,), dtype=dtype)
    taken = input_types.input_dtypes(keras.Model(features, keras.layers.Identity()(features)), (1,))
    assert taken == ("float32" if dtype == "float16" else dtype)


@pytest.mark.parametrize(("dtype", "wrong"), [("uint8", 256), ("uint32", -1), ("bool", 2), ("int32", 0.5)])
def test_an_example_is_taken_if_the_input_can_hold_its_values(make_run, tmp_path, dtype, wrong):
    run, inputs, file = make_run(workers=0), keras.Input((2,), dtype=dtype), tmp_path / "example.json"
    export.export(
        keras.Model(inputs, keras.layers.Lambda(lambda of: tf.cast(of, "float32"))(inputs)), run.export, (2,), None
    )
    file.write_text("[0, 1]")
    assert ["0", "1"] == [line.strip() for line in predict(run, None, file)]
    file.write_text(json.dumps([0, wrong]))
    with pytest.raises(UsageError):
        predict(run, None, file)


@pytest.mark.parametrize(
    ("shape", "names", "lines"),
    [
        ((), None, 1),
        ((2, 4, 3), None, 2),
        ((3,), ["a", "b", "c"], 3),
        ((3,), [], 3),
        ((4, 3), ["a", "b", "c"], 4),
        ((1,), ["a", "b"], 1),
    ],
)
def test_outputs_of_any_shape_can_be_shown(shape, names, lines):
    shown = show_outputs(tf.reshape(tf.range(math.prod(shape), dtype=tf.float32), shape), names)
    assert lines == len(shown)
    assert any("%" in line for line in shown) == (names is not None and len(shape) < 3 and shape[-1] > 1)
    assert all(line.isprintable() for line in shown)


class WithData:
    """A run's data of given features, perhaps in a file, and labels."""

    def __init__(self, features: Leaf, label_shape: tuple[int, ...], path: Path | None = None) -> None:
        self.label_shape, self.in_memory = label_shape, path is not None
        self.record = Mock(**{"train.leaves": [features], "train.files": [Mock(path=path)]})


def test_images_are_pixels_in_the_type_of_the_input(make_run, tmp_path, monkeypatch):
    run, inputs = make_run(workers=0), keras.Input((2, 3, 1), dtype="uint8")
    turned = Image.new("L", (2, 3), 200)  # upright it is 3 x 2
    turned.putpixel((0, 0), 7)
    exif = turned.getexif()
    exif[Base.Orientation] = 6  # turned right
    turned.save(tmp_path / "photo.png", exif=exif)
    export.export(keras.Model(inputs, keras.layers.Flatten()(inputs)), run.export, (2, 3, 1), None)
    shown = [line.strip() for line in predict(run, tmp_path / "photo.png")]
    assert ["7" if at == 2 else "200" for at in range(6)] == shown
    Image.new("I;16", (3, 2), 200 * 257).save(tmp_path / "deep.png")
    with pytest.raises(UsageError, match="more than 8 bits"):
        predict(run, tmp_path / "deep.png")
    (booleans := tmp_path / "features.bin").write_bytes(bytes([0, 1] * 6))
    for data in (WithData(Leaf((2, 3, 1), "float32"), ()), WithData(Leaf((2, 3, 1), "uint8"), (), booleans)):
        monkeypatch.setattr(prediction, "_open_source", lambda *_, data=data: data)
        with pytest.raises(UsageError, match="--features"):
            predict(run, tmp_path / "photo.png")


def test_several_labels_and_outputs_without_labels_are_values(make_run, tmp_path, monkeypatch):
    run, inputs, file = make_run(workers=0), keras.Input((2,)), tmp_path / "example.json"
    file.write_text("[0.25, 0.75]")
    monkeypatch.setattr(prediction, "_open_source", lambda *_: WithData(Leaf((2,), "float32"), (2,)))
    export.export(keras.Model(inputs, keras.layers.Identity()(inputs)), run.export, (2,), [])
    assert ["0.25", "0.75"] == [line.strip() for line in predict(run, None, file)]
    own = {"mean": keras.layers.Identity()(inputs), "scale": keras.layers.Identity()(inputs)}
    export.export(keras.Model(inputs, own), run.export, (2,), {"label": ["a", "b"]})
    assert {"mean", "scale"} == {line.split(":")[0] for line in predict(run, None, file)}
    pair = [keras.layers.Identity()(inputs), keras.layers.Rescaling(2.0)(inputs)]  # labels are one array
    export.export(keras.Model(inputs, pair), run.export, (2,), [])
    shown = [f"output_{at}:  {value}" for at, value in [(0, 0.25), (0, 0.75), (1, 0.5), (1, 1.5)]]
    assert shown == predict(run, None, file)
    model = type("Own", (keras.Model,), {"call": lambda _, inputs: 2 * inputs})()
    model.built = True  # so that Keras records no shape
    model(inputs)
    export.export(model, run.export, (2,), [])
    assert ["0.5", "1.5"] == [line.strip() for line in predict(run, None, file)]


def test_probabilities_are_shown_as_they_are(make_run, tmp_path):
    """With a loss such as Keras's `from_logits=False` a model may end with a softmax."""
    run, inputs, file = make_run(workers=0), keras.Input((2,)), tmp_path / "example.json"
    export.export(keras.Model(inputs, keras.layers.Identity()(inputs)), run.export, (2,), ["cat", "dog"])
    file.write_text("[0.25, 0.75]")
    for loss, line in (("own:loss", " 75.00%  dog"), ("sparse_categorical_crossentropy", " 62.25%  dog")):
        write_json(run.config, {"loss": loss})
        assert line == predict(run, None, file)[0]
    assert show_outputs(tf.constant([1.0, 3.0]), [], "own:loss")[0].startswith(" 88.08%")
