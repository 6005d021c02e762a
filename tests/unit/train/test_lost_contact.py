"""The reason for a lost contact, or for exhausted resources, is found in TensorFlow's error."""

import errno
import os

import pytest
import tensorflow as tf

from train import program

HEAD = "Graph execution error:\n\nDetected at node CollectiveReduceV2 defined at (most recent call last):\n\n"
TAIL = "The error could be from a previous operation. Restart your program.\n\t [[{{node CollectiveReduceV2}}]]"
UNHEALTHY = "Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped sending heartbeats):\n"
REMOTE = "Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling RecvBuf:\n"
RESET = f'{REMOTE}:UNKNOWN:Error received from peer {{grpc_message:"Collective ops is aborted by: reset\\n"}}\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"{HEAD}Collective ops is aborted by: {UNHEALTHY}/job:worker/replica:0/task:1\nCrashed.\n{TAIL}",
            "no heartbeat of worker-1 reached the chief",
        ),
        (
            f"{UNHEALTHY}/job:worker/replica:0/task:0\n/job:chief/replica:0/task:0\n{TAIL}",
            "no heartbeat of chief and worker-0 reached the chief",
        ),
        (f"{HEAD}Collective ops is aborted by: Deadline Exceeded\n\nRPC: Heartbeat\n{TAIL}", "Deadline Exceeded"),
        (
            f"{HEAD}{2 * 'Collective ops is aborted by: '}recvmsg:Connection reset\n{RESET}{TAIL}",
            "recvmsg:Connection reset",
        ),
        (f"{HEAD}  File 'a.py', line 1\n\nSocket closed\n{TAIL}", "Socket closed"),
        ("Socket closed\nmore", "Socket closed"),
        ("", ""),
    ],
)
def test_the_reason_is_one_short_line(text, reason):
    assert reason == program.describe_lost_contact(tf.errors.UnavailableError(None, None, text))


def test_a_step_that_an_unreported_error_cancelled_is_not_lost_contact():
    assert program.is_cancelled(tf.errors.CancelledError(None, None, f"{HEAD}group is cancelled\n{TAIL}"))
    assert not program.is_cancelled(tf.errors.CancelledError(None, None, f"{HEAD}Collective ops is aborted by: reset"))


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        (f"ckpt; {os.strerror(errno.ENOSPC)}", "free space"),
        (f"ckpt; {os.strerror(errno.EMFILE)}", "None"),  # another attempt may have less of them
        (f"{HEAD}OOM when allocating tensor with shape[9]\n{TAIL}", "(OOM when allocating tensor with shape[9]); use"),
    ],
)
def test_what_the_system_lacks_is_not_always_memory(problem, advice):
    assert advice in str(program.explain(tf.errors.ResourceExhaustedError(None, None, problem)))
