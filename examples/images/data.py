"""Pictures from the folder `photos/`: the subfolder of a picture is its class.

Without that folder, some are drawn first; put your own in its place.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

FOLDER = Path(__file__).with_name("photos")
SIZE = 32
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
PICTURES = 160
"""How many are drawn of each class."""
SKY_AND_GROUND = {
    "desert": ((120, 180, 230), (220, 180, 110)),
    "forest": ((150, 190, 220), (40, 100, 50)),
    "sunset": ((240, 130, 60), (60, 50, 90)),
}


def read(path):
    """Return a picture `[SIZE, SIZE, 3] uint8`, scaled to a square as `predict --image` scales it."""
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")  # as it was held
        return np.asarray(upright.resize((SIZE, SIZE)))


def data():
    """Return the pictures of the folder; every fifth of each class is for testing."""
    if not FOLDER.exists():
        draw()
    classes = sorted(each.name for each in FOLDER.iterdir() if each.is_dir())
    found = {"train": [], "test": []}
    for label, name in enumerate(classes):
        paths = sorted(path for path in (FOLDER / name).iterdir() if path.suffix.lower() in SUFFIXES)
        for at, path in enumerate(paths):
            found["test" if at % 5 == 0 else "train"].append((read(path), label))
    splits = {
        split: (np.stack([image for image, _ in examples]), np.array([label for _, label in examples]))
        for split, examples in found.items()
    }
    return {**splits, "classes": classes}


def draw():
    """Draw pictures of three places, of many sizes and in any light, and write them to the folder."""
    random = np.random.default_rng(0)
    for name, (sky, ground) in SKY_AND_GROUND.items():
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        for at in range(PICTURES):
            height, width = random.integers(40, 90, 2)
            pixels = np.empty((height, width, 3))
            horizon = int(height * random.uniform(0.3, 0.7))
            pixels[:horizon], pixels[horizon:] = sky, ground
            pixels = pixels * random.uniform(0.4, 1.1) + random.normal(0, 35, pixels.shape)
            picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            picture.save(FOLDER / name / f"{at:03}.png")
    print(f"wrote {PICTURES * len(SKY_AND_GROUND)} pictures to {FOLDER.name}/")
