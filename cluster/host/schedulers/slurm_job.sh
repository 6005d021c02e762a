#!/bin/bash
$directives

$exports

trap $stop USR1  # the time limit is near: every task saves at the same step and ends
trap 'ended=yes' TERM  # scancel or preemption: the tasks do the same, and Slurm decides what follows

srun --export=ALL --kill-on-bad-exit=0 $losses $step task $agent &
while kill -0 $! 2>/dev/null; do wait $!; done

[ -n "$ended" ] && exit 143
$step result
code=$?
[ $code = 75 ] && exec scontrol requeue "$SLURM_JOB_ID"  # it continues from its newest checkpoint
exit $code
