"""`float` and `int` take a variable that replicas have copies of, such as `optimizer.learning_rate` in a callback.

Defect: TensorFlow's DistributedVariable lacks these methods of its other variables.
Versions: TensorFlow 2.21.0.
Test: tests/unit/train/patches/test_script_patches.py::test_numbers_and_arrays_of_a_script_must_be_those_of_one_process
Not applied: if the class has them.
"""

from tensorflow.python.distribute.values import DistributedVariable  # has no public name


def apply() -> list[str]:
    """Add the methods that the class lacks."""
    numbers = {"__float__": lambda variable: float(variable.numpy()), "__int__": lambda variable: int(variable.numpy())}
    missing = [name for name in numbers if not hasattr(DistributedVariable, name)]
    for name in missing:
        setattr(DistributedVariable, name, numbers[name])
    return missing
