"""Host side and launcher of a TensorFlow cluster. Standard library only: nothing here imports TensorFlow."""
