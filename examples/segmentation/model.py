"""A U-Net: three resolutions, with connections that skip the lower ones."""

from tensorflow import keras

layers = keras.layers


def block(x, filters):
    """Apply two convolutions, each followed by a normalization over the global batch."""
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
    return x


def model(feature_shape, num_outputs):
    """Return the network: pictures `[B, H, W, C]` to the logits of every pixel, `[B, H, W, num_outputs]`."""
    inputs = keras.Input(feature_shape)
    high = block(inputs, 8)
    middle = block(layers.MaxPooling2D()(high), 16)
    x = block(layers.MaxPooling2D()(middle), 32)
    for skipped, filters in ((middle, 16), (high, 8)):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = block(layers.Concatenate()([x, skipped]), filters)
    return keras.Model(inputs, layers.Conv2D(num_outputs, 1)(x))
