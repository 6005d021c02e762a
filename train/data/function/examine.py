"""Examines a dataset function before a run starts: the form, shapes and number of its examples."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tensorflow as tf

from cluster.contract import kept_results, user_code
from cluster.system.errors import UsageError
from cluster.system.json_files import write_json
from cluster.system.terminal import warn
from train import named, random_operations
from train.data import store
from train.data.batches import BatchSlice, Replicas
from train.data.dataset_record import SPLITS, show_example, values_in
from train.data.function import reading
from train.data.function.reading import DATASET, RANDOM_ACCESS, FunctionRecord, Shard
from train.named import Named
from train.settings import parts
from train.settings.references import user_errors


def examine_function(
    name: str, data_dir: Path, num_outputs: str = "", *, seed: int = 0, fresh: bool = False
) -> FunctionRecord:
    """Call a dataset function for both splits, and write a record of it to `data_dir`.

    `num_outputs` gives the number of classes of integer labels, such as `10`, or `digit=10,parity=2`; with `fresh` the
    examples of datasets without a known length are counted again.
    """
    began = time.time()
    store.say(f"calling {name}")
    with store.disk_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
    returned = {split: reading.call_function(name, split, Shard(0, 1, seed, data_dir)) for split in SPLITS}
    forms = {split: DATASET if isinstance(data, tf.data.Dataset) else RANDOM_ACCESS for split, data in returned.items()}
    if len(set(forms.values())) > 1:
        raise UsageError(
            f"--dataset {name!r} returns {forms['train']} for 'train', {forms['test']} for 'test'; use one"
        )
    form = forms["train"]
    if form == DATASET:
        _warn_of_random_numbers(name, returned["train"])
    examples = {}
    for split, data in returned.items():
        if form == DATASET:
            examples[split] = reading.describe_dataset(name, split, data)
            continue
        reading.length_of(name, split, data)
        subject = f"--dataset {name!r}: {split} example 0"
        with user_errors(subject):
            first = data[0]
        examples[split] = reading.describe_example(subject, reading.convert_to_arrays(subject, first))
    example = examples["train"]
    if examples["test"] != example:
        both = " and ".join(show_example(described) for described in examples.values())
        raise UsageError(f"--dataset {name!r}: examples of train and test are {both}; expected the same")
    outputs = _outputs(name, example["labels"], num_outputs)
    counts, counted = _counts(name, returned, data_dir, began, fresh=fresh)
    leaves = {part: named.each(asdict, leaf) for part, leaf in example.items()}
    value = {"name": name, "form": form, "example": leaves, "num_outputs": outputs}
    value |= {"counts": counts, "counted": counted}
    record = FunctionRecord.from_json(data_dir, value)
    if form == DATASET:
        with user_errors(f"--dataset {name!r} cannot be built in every epoch, where shard.seed is a tensor"):
            source = reading.FunctionSource(record=record, data_dir=data_dir)
            source.shard_batches(BatchSlice(2, seed, replicas=Replicas(2)), 0)
    with store.lock(data_dir):
        write_json(record.path(data_dir, name, record.version), value)
        store.write_pointer(data_dir, record.kind, name, record.version)
    return record


def _warn_of_random_numbers(name: str, dataset: tf.data.Dataset) -> None:
    """Warn of a training split with random numbers that do not follow from the shard's seed."""
    found = set[str]().union(*map(random_operations.find_operations, random_operations.graphs_of(dataset)))
    if drawing := found & random_operations.DRAWING:
        warn(
            f"--dataset {name!r} draws by TensorFlow's {min(drawing)}, whose numbers start over after a restart; use "
            "tf.random.stateless_* or tf.image.stateless_* with shard.seed"
        )
    if found & random_operations.ASSIGNING:
        warn(
            f"--dataset {name!r} assigns a variable, as a random layer of Keras does, which returns to its first value "
            "after a restart"
        )


def _counts(
    name: str, returned: Mapping[str, Any], data_dir: Path, began: float, *, fresh: bool
) -> tuple[dict[str, int], bool]:
    variables = {key: value for key, value in os.environ.items() if key not in (user_code.RESULT_FILE, "TMPDIR")}
    kept = kept_results.locate(data_dir, ["count", name], variables)
    known = None if fresh else kept_results.recall(kept)
    counts, counted = {}, False
    for split, data in returned.items():
        if not isinstance(data, tf.data.Dataset):
            counts[split] = len(data)
            continue
        count = int(data.cardinality())
        if count == tf.data.INFINITE_CARDINALITY:
            raise UsageError(f"--dataset {name!r}: {split} never ends; expected one epoch, without repeat()")
        if count == tf.data.UNKNOWN_CARDINALITY:
            counted = True
            if known is None:
                store.say(f"counting the {split} examples: the dataset does not know its length (assert_cardinality)")
                with user_errors(f"--dataset {name!r}: reading {split}"):
                    count = int(data.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))
            else:
                count = known[0][split]
        if not count:
            raise UsageError(f"--dataset {name!r} has no {split} example; expected at least one")
        counts[split] = count
    if counted and known is None:
        kept_results.keep(kept, began, {"value": counts, "opened": kept_results.opened(), "written": []}, "")
    return counts, counted


def _outputs(name: str, labels: Named, num_outputs: str) -> Named:
    requested = parts.parse_outputs(num_outputs)
    outputs = {}
    for head, leaf in labels.items() if isinstance(labels, Mapping) else [("", labels)]:
        if leaf.dtype == "float32":
            outputs[head] = values_in(leaf.shape)
        elif head in requested:
            outputs[head] = requested[head]
        else:
            of_head, example = (f" of {head!r}", ",".join(f"{key}=10" for key in labels)) if head else ("", "10")
            raise UsageError(
                f"--num-outputs {num_outputs!r}: labels{of_head} of {name} are whole numbers; expected the number "
                f"of classes, such as -- --num-outputs {example}"
            )
    return outputs.get("", outputs)
