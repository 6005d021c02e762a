"""Ratings of items by users, whose names become numbers."""

import numpy as np

USERS, ITEMS = 50, 80


def ratings():
    """Yield `(user, item, rating)`, with names as in a table."""
    random = np.random.default_rng(0)
    tastes, traits = random.normal(size=(USERS, 3)) / 2, random.normal(size=(ITEMS, 3)) / 2
    pairs = random.choice(USERS * ITEMS, size=3000, replace=False)  # none is both trained on and held out
    for user, item in zip(*divmod(pairs, ITEMS), strict=True):
        yield f"user-{user:03}", f"sku-{item:04}", tastes[user] @ traits[item] + random.normal(0, 0.05)


def data():
    """Return the numbers of users and items, `[N] int32` each, and ratings `[N]`; the last tenth is held out."""
    users, items, labels = map(np.array, zip(*ratings(), strict=True))
    # A name's number is its place among all names, which must not change between training and prediction.
    features = {
        name: np.unique(names, return_inverse=True)[1].astype(np.int32)
        for name, names in (("user", users), ("item", items))
    }
    held_out = np.arange(len(labels)) >= 0.9 * len(labels)
    return {
        split: ({name: numbers[chosen] for name, numbers in features.items()}, labels[chosen])
        for split, chosen in (("train", ~held_out), ("test", held_out))
    }
