"""Training one model in stages: where it is cut, what each stage does in which order, and how stages exchange data.

`partition` and `schedule` are pure functions and import no TensorFlow: what `plan` shows comes from them.
"""
