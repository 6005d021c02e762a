"""`--loop fit`: Keras's own `Model.fit`, and what is done between its batches."""
