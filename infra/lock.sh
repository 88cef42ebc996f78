#!/bin/sh
# Write what `VENV` holds to requirements.lock: `sh infra/lock.sh VENV`.
set -eu
"$1/bin/python" -m pip install --quiet -c requirements.lock -e ".[dev,s3]"
{
    sed -n '/^#/p' requirements.lock
    "$1/bin/python" -m pip freeze --exclude-editable |
        grep -v -i -E '^#|^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)=='
} >requirements.lock.new
mv requirements.lock.new requirements.lock
git diff --stat -- requirements.lock
