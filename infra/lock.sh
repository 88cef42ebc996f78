#!/bin/sh
# Write what `VENV` holds to requirements.lock: `sh infra/lock.sh VENV`.
set -eu
"$1/bin/python" -m pip install --quiet -c requirements.lock -e ".[dev,s3,oss,benchmarks]"
{
    sed -n '/^#/p' requirements.lock
    "$1/bin/python" -m pip list --format=freeze --exclude-editable |
        grep -v -i -E '^#|^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+|facenet-pytorch|rapidocr.*|transnetv2.*|opencv-python|pip|setuptools|wheel|ffmpeg-python|py-spy|ossfs|aiooss2|shapely|pyclipper)=='
} >requirements.lock.new
mv requirements.lock.new requirements.lock
git diff --stat -- requirements.lock
