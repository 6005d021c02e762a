"""Pictures for TensorBoard's Images tab."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

CELL, LETTER, LINE = 26, 6, 12
"""Sizes in pixels: a cell of the confusion matrix, a letter and a line of Pillow's font. With ten classes TensorBoard
does not scale the picture."""
MARGIN = 4
MAX_NAME = 20
LEGEND = ("rows: true", "columns: predicted")
WHITE, BLUE, RED = np.array([255, 255, 255]), np.array([38, 111, 191]), np.array([214, 81, 58])


def captioned(image_HWC: np.ndarray, predicted: str, truth: str) -> np.ndarray:
    """Enlarge an image to `[144, 112, 3] uint8` and add a caption, green if correct and red if wrong."""
    pixels = image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC
    picture = Image.new("RGB", (112, 144), "black")
    picture.paste(Image.fromarray(pixels).convert("RGB").resize((112, 112), Image.Resampling.NEAREST))
    draw = ImageDraw.Draw(picture)
    draw.text((2, 112), predicted, fill="lightgreen" if predicted == truth else "salmon")
    if predicted != truth:
        draw.text((2, 127), f"is {truth}", fill="white")
    return np.asarray(picture)


def confusion(classes: Sequence[str], truth_N: np.ndarray, predicted_N: np.ndarray) -> np.ndarray:
    """Draw a confusion matrix, `[H, W, 3] uint8`, with a row for each true class, a column for each predicted one.

    Args:
        classes: K names.
        truth_N: `[N] int`, the class of each example.
        predicted_N: `[N] int`, the predicted class of each example.
    """
    names = [name[:MAX_NAME] for name in classes]
    count_KK = np.zeros((len(names), len(names)), int)
    np.add.at(count_KK, (truth_N, predicted_N), 1)
    share_KK = count_KK / np.maximum(count_KK.sum(axis=1, keepdims=True), 1)
    edge = max(map(len, [*names, *LEGEND])) * LETTER + 2 * MARGIN
    size = edge + CELL * len(names) + MARGIN
    picture = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN), "\n".join(LEGEND), fill="gray", spacing=0)
    for row, name in enumerate(names):
        middle = edge + row * CELL + (CELL - LINE) // 2
        draw.text((edge - MARGIN - draw.textlength(name), middle), name, fill="black")
        _write_upwards(picture, name, middle, edge - MARGIN)
        for column, count in enumerate(count_KK[row]):
            x, y, share = edge + column * CELL, edge + row * CELL, share_KK[row, column]
            colour = WHITE + share * ((BLUE if row == column else RED) - WHITE)
            draw.rectangle((x, y, x + CELL - 2, y + CELL - 2), fill=tuple(colour.astype(int)))
            if count:
                left = (CELL - draw.textlength(str(count))) // 2
                draw.text((x + left, middle), str(count), fill="white" if share > 0.5 else "black")
    return np.asarray(picture)


def _write_upwards(picture: Image.Image, text: str, x: int, bottom: int) -> None:
    line = Image.new("RGB", (len(text) * LETTER + 1, LINE), "white")
    ImageDraw.Draw(line).text((0, 0), text, fill="black")
    turned = line.transpose(Image.Transpose.ROTATE_90)
    picture.paste(turned, (x, bottom - turned.height))
