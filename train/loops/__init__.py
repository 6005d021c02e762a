"""The training loops.

Files to read, in order:
`training.py` (the parts of a training), `custom.py` or `fit.py` (what runs the steps), `loop.py` (calls and actions),
`actions.py` (the actions), `steps.py` (many steps in one call), `train_step.py` (one step).
"""
