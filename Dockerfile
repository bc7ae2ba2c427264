# docker build --target cpu -t shuntyard:cpu .
# docker build --target gpu -t shuntyard:gpu .
# docker run -p 8000:8000 --shm-size 2g -v shuntyard:/var/cache/shuntyard shuntyard:cpu [options]

FROM vllm/vllm-openai:v0.32.0 AS gpu
WORKDIR /app
COPY . .
# Adds what the image lacks; the constraint keeps pip from changing what is there.
RUN python3 -m pip list --format=freeze > /tmp/image.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/image.txt -e . \
    && rm /tmp/image.txt \
    && useradd --create-home --uid 10001 shuntyard \
    && install -d -o shuntyard /var/cache/shuntyard
ENV SHUNTYARD_CACHE_DIR=/var/cache/shuntyard \
    HF_HOME=/var/cache/shuntyard/huggingface \
    SHUNTYARD_WORKFLOW_DATA=/var/cache/shuntyard/workflows
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=10m --timeout=5s \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('SHUNTYARD_PORT', 8000)}/health\", timeout=4)"]
ENTRYPOINT ["shuntyard", "serve", "--host", "0.0.0.0"]

FROM python:3.11-slim AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The engine's CPU kernels link to libnuma; all else comes with the wheels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 shuntyard \
    && install -d -o shuntyard /var/cache/shuntyard
WORKDIR /app
COPY requirements/cpu.lock requirements/
# The lock without its second part, which is for tests.
RUN sed '/^# Only for tests/,$d' requirements/cpu.lock > /tmp/serving.lock \
    && pip install --no-cache-dir --no-deps --extra-index-url "$TORCH_INDEX" -r /tmp/serving.lock \
    && rm /tmp/serving.lock
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
ENV SHUNTYARD_CACHE_DIR=/var/cache/shuntyard \
    HF_HOME=/var/cache/shuntyard/huggingface \
    SHUNTYARD_WORKFLOW_DATA=/var/cache/shuntyard/workflows
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=2m --timeout=5s \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('SHUNTYARD_PORT', 8000)}/health\", timeout=4)"]
ENTRYPOINT ["shuntyard", "serve", "--host", "0.0.0.0"]
