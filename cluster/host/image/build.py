"""Build the images of this checkout, unless they exist and are current."""

from __future__ import annotations

from collections.abc import Callable

from cluster.host.image import engine, images


def commands(accelerator: str) -> list[str]:
    """Return the commands that build the images; none if they exist and are current."""
    if images.are_current(accelerator):
        return []
    found = images.build_commands(accelerator, images.default_base())
    if engine.ask("image", "inspect", *(images.name(image, accelerator) for image in images.IMAGES))[0] == 0:
        # A rebuild with little or nothing changed takes seconds: then only what goes wrong is worth reading.
        return [command.replace("docker build", "docker build --quiet", 1) for command in found]
    return found


def build(sh: Callable[[str], object], accelerator: str = "cpu", *, renew: bool = True) -> None:
    """Build the images.

    Args:
        sh: runs commands.
        accelerator: of the tasks' image.
        renew: whether they are built where they are not current; otherwise only where the tasks' is gone, so that
            more tasks of a run are like the first.
    """
    if not renew and engine.ask("image", "inspect", images.train_image(accelerator))[0] == 0:
        return
    for command in commands(accelerator):
        sh(command)
