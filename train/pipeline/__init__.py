"""Training one model in stages: where it is cut, the order of each stage's work, and how stages exchange data.

`partition` and `schedule` are pure functions and import no TensorFlow, so that `plan` can use them.
"""
