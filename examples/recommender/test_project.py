"""`tf-cluster test` runs this in the training environment."""

import unittest

import numpy as np
from data import data
from model import model


class ProjectTest(unittest.TestCase):
    def test_the_model_takes_the_data(self):
        features, labels = data()["train"]
        shapes = {name: numbers.shape[1:] for name, numbers in features.items()}
        outputs = model(shapes, 1)({name: numbers[:2] for name, numbers in features.items()})
        assert (2, 1) == tuple(outputs.shape)
        assert len(features["user"]) == len(labels)
        assert np.isfinite(outputs).all()


if __name__ == "__main__":
    unittest.main()
