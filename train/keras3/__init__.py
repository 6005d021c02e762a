"""What Keras 3 lacks under tf.distribute: `Model.fit` on several tasks, and the replicas' own random numbers.

The built-in trainer and users' scripts share it, so its modules import nothing of this project: in a script's process
they are loaded by path (`hook/sitecustomize.py`), where a user's own `train.py` may be what `import train` finds. Each
patch checks that Keras still has the defect, and leaves a Keras that has not as it is. docs/internals/upstream/ has
the patch for Keras itself.
"""
