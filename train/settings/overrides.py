"""Builds a configuration from a preset and the overrides on a command line."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

from cluster.system.errors import UsageError, nearest
from cluster.system.messages import COMMAND
from train import presets
from train.config import TrainConfig
from train.settings import references
from train.settings.parts import check_types, option, shown


class Help(Exception):
    """The requested help of the training options, as text."""


def resolve_config(
    preset: str, overrides: Sequence[str], base: TrainConfig | None = None, cores: int = 0
) -> TrainConfig:
    """Apply overrides to a preset's configuration, or to `base`, that of a resumed run.

    The preset is one of `presets.list_presets()`, or `package.module:function` that returns a `TrainConfig`. Overrides
    are options such as `["--epochs", "3", "--optimizer.learning-rate", "0.001"]`. `cores` is the number of cores per
    task on another machine; 0 for those of this machine. Raises UsageError if the preset or an option is unknown (the
    message offers the nearest name), or a value is out of range.
    """
    resumes = base is not None
    if base is None:
        built_in = presets.list_presets()
        references.check_reference("--preset", preset, built_in)
        function = presets.load_preset(preset) if preset in built_in else references.load_object("--preset", preset)
        config = references.call_user_function("--preset", preset, function)
        if not isinstance(config, TrainConfig):
            raise UsageError(f"--preset {preset!r} returned {shown(config)}; expected a train.config.TrainConfig")
        check_types(config, f"--preset {preset!r}: ")
        base = dataclasses.replace(config, preset=preset)
    known = {option(name) for name in flat_settings(TrainConfig()) if name != "preset"}
    overrides = [re.sub(r"^--no-(.+\.)", r"--\1no-", argument) for argument in overrides]  # as tyro names it in a part
    for argument in overrides:
        name = argument.split("=", 1)[0].replace("_", "-")
        if argument.startswith("--") and not {name, re.sub(r"^--(.+\.)?no-", r"--\1", name)} & known:
            raise UsageError(f"override {argument!r} is not an option of the training config{nearest(name, known)}")
    config = _parse(base, overrides)
    if resumes and config.precision != base.precision and not any(word.startswith("--onednn") for word in overrides):
        config = dataclasses.replace(config, onednn="auto")  # the run's choice was for its precision
    return config.check().check_references().pin(cores)


def _parse(base: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    if not overrides:
        return base  # saves the import of tyro, a fifth of a second
    import tyro  # type-checked command line from the dataclasses; imported here because tasks need it only once

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            return tyro.cli(
                TrainConfig,
                prog=f"{COMMAND} up --",  # the default is the program's path, which tyro parses like a shell
                args=list(overrides),
                default=base,
                config=(tyro.conf.SuppressFixed,),
            )
    except SystemExit as error:
        if not error.code:
            raise Help(output.getvalue()) from None
        # A title, the problem and advice, separated by rules.
        parts = [re.sub(r"[^\x21-\x7e]+", " ", part).strip() for part in re.split(r"[-\u2500]{4,}", output.getvalue())]
        problem = next(filter(None, parts[1:]), parts[0])
        raise UsageError(f"override {' '.join(overrides)!r}: {problem}; see `{COMMAND} up -- --help`") from None


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings by names such as `part.setting`."""
    flat: dict[str, Any] = {}
    for name, value in config.to_json().items():
        flat |= {f"{name}.{part}": item for part, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat
