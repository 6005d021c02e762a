"""The same thing several times at once."""

import threading
from collections.abc import Callable


def together(body: Callable[[int], None], count: int = 8) -> None:
    """Run `body` in several threads at the same moment."""
    start = threading.Barrier(count)
    threads = [threading.Thread(target=lambda at=at: (start.wait(), body(at))) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
