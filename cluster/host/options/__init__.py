"""The options of `up` and `plan`, and the run files that contain them."""
