"""`--loop fit`: Keras's own `Model.fit`, and the work between its batches."""
