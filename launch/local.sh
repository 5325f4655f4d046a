#!/usr/bin/env bash
# One machine: its GPUs or TPUs if it has any, else 8 simulated devices on its processor.
# Edit: nothing. Arguments are passed on: launch/local.sh backend=torch sharding=fsdp mesh.devices=4
set -euo pipefail
exec scaling-lab run cluster=local "$@"
