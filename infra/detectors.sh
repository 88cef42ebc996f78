#!/bin/sh
# Optional detectors with their weights, for `cut`: faces (MTCNN) and text (DBNet). Their wheels pin old versions of
# libraries that only their training code needs, so they are installed alone: `sh infra/detectors.sh .venv`.
set -eu
venv=${1:-.venv}
"$venv/bin/python" -m pip install --disable-pip-version-check --no-deps "facenet-pytorch==2.6.0" "rapidocr-onnxruntime==1.4.4"
