#!/bin/bash
# Trains one run on several nodes of a Slurm cluster:
#
#   sbatch --nodes=4 deploy/slurm.sh run.yaml --set train.steps=5000
#
# srun starts one process on each node, and Baton finds the others in SLURM_STEP_NODELIST. A minute before the time limit
# the processes get SIGTERM; they commit and end with exit code 3. The job is then queued again and goes on from the commit,
# as it does when it is preempted or loses a node. A run that is refused (exit code 2) or damaged (4) ends the job.

#SBATCH --job-name=baton
#SBATCH --output=baton-%j.log
#SBATCH --open-mode=append
#SBATCH --time=04:00:00
#SBATCH --nodes=2
# One process uses all CPUs and GPUs of its node, and the ports of its node are its own.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# edit: on nodes with GPUs, remove one of the two #
##SBATCH --gpus-per-node=8
# Without "B:", srun's processes get the signal, and not this script.
#SBATCH --signal=TERM@60
#SBATCH --requeue

# edit: what finds `baton` on every node
# source /shared/baton/.venv/bin/activate

# Of a step of one task, some clusters bind the task to one core.
srun --cpu-bind=none baton run "$@" --set accelerator.kind=multi_worker
code=$? # the highest of all processes; 128 + N if signal N killed one, and the others have left with 3

if [ "$code" -eq 3 ] || [ "$code" -gt 128 ]; then
  echo "slurm.sh: exit code $code: work is left; job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
