"""Models, losses, optimizers, and what Keras needs under tf.distribute."""
