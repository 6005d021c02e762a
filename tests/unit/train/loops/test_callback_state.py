"""The state of callbacks in a checkpoint."""

from __future__ import annotations

from tensorflow import keras

from train.loops.callback_state import Progress, _decode, _encode, attributes, changed, restore


def test_a_restored_plateau_counts_on() -> None:
    def plateau() -> keras.callbacks.ReduceLROnPlateau:
        callback = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=9, min_delta=0.5)
        callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        callback.model.compile("adam", "mse")
        return callback

    first, undisturbed = plateau(), plateau()
    made = attributes(first)
    for callback in (first, undisturbed):
        for epoch, loss in enumerate((2.0, 1.9)):
            callback.on_epoch_end(epoch, {"loss": loss})
    saved = Progress(callbacks=[changed(first, made)], classes=["ReduceLROnPlateau"])
    resumed = plateau()
    assert restore([resumed], Progress(**_decode(_encode(vars(saved)))))
    for callback in (resumed, undisturbed):
        callback.on_epoch_end(2, {"loss": 1.8})  # within `min_delta` of the best
    state = [(callback.best, callback.wait, callback.min_delta) for callback in (resumed, undisturbed)]
    assert [(2.0, 2, -0.5)] * 2 == state
