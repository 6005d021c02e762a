"""`tf-cluster test` runs this in the training environment."""

import unittest

import numpy as np
from data import data
from model import model


class ProjectTest(unittest.TestCase):
    def test_the_model_takes_the_data(self):
        features, labels = data()["train"]
        outputs = model(features.shape[1:], 6)(features[:2])
        assert (2, 6) == tuple(outputs.shape)
        assert len(features) == len(labels)
        assert np.isfinite(outputs).all()


if __name__ == "__main__":
    unittest.main()
